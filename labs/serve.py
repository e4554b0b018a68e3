"""llama.cpp's server on this machine, from the package xllamacpp: nothing to compile. For any GGUF files.

    python labs/serve.py TARGET.gguf                        http://127.0.0.1:8080, until Ctrl-C
    python labs/serve.py TARGET.gguf DRAFT.gguf             the same, and the target with its draft at port 8081
    python labs/serve.py TARGET.gguf DRAFT.gguf -- COMMAND  as long as the command runs

It speaks OpenAI's protocol. Keys and values are kept in float32, so that the texts can be compared; llama-server has
--cache-type-k f32 --cache-type-v f32 for that. It listens on 127.0.0.1 alone: nobody else can reach it.
"""

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request


def check(files, ports):
    """Raise ValueError or OSError, in one line, for a file that is no GGUF file, and for a port that cannot be had."""
    for file in files:
        with open(file, "rb") as f:
            if f.read(4) != b"GGUF":
                raise ValueError(f"{file} is no GGUF file; the tiny pair: python tiny/to_gguf.py DIR")
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            try:
                free.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                raise OSError(f"port {port} of 127.0.0.1 cannot be had ({error}): give another --port") from None


def serve(target, draft=None, port=0, gamma=4, threads=1, context=512):
    """Start a server. target, draft: GGUF files. port 0: a free one. Returns an object that has `listening_address`, as
    http://127.0.0.1:8080; the server ends with it. Raises as `check` does.
    """
    try:
        import xllamacpp as llama
    except ImportError:
        raise ValueError("the server needs the package xllamacpp: pip install xllamacpp") from None
    check([file for file in (target, draft) if file], [port])
    asked = llama.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.verbosity = target, context, 1, 0
    asked.hostnames, asked.port = ["127.0.0.1"], port
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = threads
    asked.cache_type_k = asked.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    if draft:
        asked.speculative.types = [llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        asked.speculative.draft.mparams.path, asked.speculative.draft.n_max = draft, gamma
    server = llama.Server(asked)
    for _ in range(100):  # until it answers: one that is stopped before that can hang for ever
        try:
            urllib.request.urlopen(f"{server.listening_address}/health", timeout=10).close()
            break
        except OSError:
            time.sleep(0.1)
    return server


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    command = argv[cut + 1 :]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="serve.py", description=__doc__, formatter_class=raw)
    parser.add_argument("target", metavar="TARGET.gguf")
    parser.add_argument("draft", nargs="?", metavar="DRAFT.gguf")
    parser.add_argument("--port", type=int, default=8080, help="of the target alone; with a draft the next one, too")
    parser.add_argument("--gamma", type=int, default=4, help="tokens a round may draft. Default: 4")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="Default: all")
    parser.add_argument("--context", type=int, default=4096, help="Default: 4096 tokens, or what the model has")
    args = parser.parse_args(argv[:cut])
    how = {"gamma": args.gamma, "threads": args.threads, "context": args.context}
    try:
        if args.draft:  # before the first one starts
            check([args.target, args.draft], [args.port, args.port + 1])
        servers = [serve(args.target, None, args.port, **how)]
        if args.draft:
            servers.append(serve(args.target, args.draft, args.port + 1, **how))
        for server, what in zip(servers, ("the target alone", "with its draft"), strict=False):
            print(f"{server.listening_address}  {what}", flush=True)
        sys.exit(subprocess.run(command).returncode if command else threading.Event().wait())
    except (OSError, ValueError, RuntimeError) as error:
        print(f"serve.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
