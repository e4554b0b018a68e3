"""A small server on 127.0.0.1 that speaks the Hub's protocol, for its real client to download from."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve(repositories):
    """Serve these as long as the `with` lasts: {"org/name": folder}. Gives the url, and the paths asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            asked.append(path)
            parts = path.removeprefix("/api/models").strip("/").split("/")
            name = "/".join(parts[:2])
            folder, rest = repositories.get(name), parts[2:]
            if folder is None:
                self.missing("RepoNotFound")
            elif rest[:1] == ["tree"]:
                files = sorted(folder.iterdir())
                entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": sha(f)} for f in files]
                self.answer(json.dumps(entries).encode(), "application/json")
            elif path.startswith("/api/models"):
                siblings = [{"rfilename": f.name} for f in folder.iterdir()]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                self.answer(json.dumps(info).encode(), "application/json")
            elif rest[:1] == ["resolve"] and (folder / rest[-1]).exists():
                self.answer(folder / rest[-1], "application/octet-stream", sha(folder / rest[-1]))
            else:
                self.missing("EntryNotFound")

        do_HEAD = do_GET

        def answer(self, body, kind, etag="none"):
            size = body.stat().st_size if isinstance(body, Path) else len(body)
            self.send_response(200)
            for name, value in (("Content-Type", kind), ("Content-Length", size), ("ETag", f'"{etag}"')):
                self.send_header(name, str(value))
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET" and isinstance(body, Path):
                with open(body, "rb") as f:
                    shutil.copyfileobj(f, self.wfile)
            elif self.command == "GET":
                self.wfile.write(body)

        def missing(self, code):
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def environment(home, **more):
    """That of a process whose client has nothing yet and downloads to `home`: it reads these when it is imported."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return own | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"} | more


@functools.cache
def sha(file):
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha1").hexdigest()
