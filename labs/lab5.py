"""Lab 5: ask a server through OpenAI's client. python labs/lab5.py http://127.0.0.1:8081 ["PROMPT"]

Any server that speaks the protocol will do. llama.cpp's says in `timings` how many tokens were drafted and kept.
"""

import sys

from openai import OpenAI, OpenAIError

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__.splitlines()[0])
prompt = sys.argv[2] if len(sys.argv) == 3 else "def read(self, name):\n"
try:
    client = OpenAI(base_url=sys.argv[1].rstrip("/").removesuffix("/v1") + "/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=48, temperature=0)
except OpenAIError as error:
    sys.exit(f"lab5.py: {sys.argv[1]}: {error} Is the server running there?")
print(prompt + answer.choices[0].text)
told = (answer.model_extra or {}).get("timings", {})  # OpenAI's own protocol has no such thing
print(f"\n{answer.usage.completion_tokens} tokens, {told.get('predicted_per_second', 0):.1f} a second")
if told.get("draft_n"):
    kept = told["draft_n_accepted"]
    print(f"{kept} of {told['draft_n']} drafts kept: {kept / told['draft_n']:.0%}")
