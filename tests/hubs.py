"""A hub on loopback: the real one is not reached from here."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Repositories = dict[str, dict[str, bytes]]  # by models/OWNER/NAME and datasets/OWNER/NAME: files by path


@contextmanager
def serving(repositories: Repositories) -> Iterator[str]:
    """Its address. What has `gated` in its name asks for consent first, `secret` for a token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Hub,), {"repositories": repositories}))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    repositories: Repositories

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        code, said, headers = self._answer(self.path.partition("?")[0])
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(said))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(said)

    def do_POST(self) -> None:
        """Who may write makes repositories, and puts files into them."""
        said = self.rfile.read(int(self.headers["Content-Length"])).decode()
        code, answer = 401, {"error": "Invalid username or password."}
        if self.headers.get("Authorization") == "Bearer hf_may_write":
            code, answer = 200, self._written(self.path, [json.loads(line) for line in said.splitlines()])
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _written(self, path: str, said: list[dict]) -> dict:
        if path == "/api/repos/create":
            name = f"{said[0]['organization']}/{said[0]['name']}"
            self.repositories.setdefault(f"models/{name}", {"visibility": said[0]["visibility"].encode()})
            return {"url": f"http://{self.headers['Host']}/{name}", "id": name}
        if path == "/api/validate-yaml":  # a card's head
            return {"errors": [], "warnings": []}
        repository, _, _ = path.removeprefix("/api/").partition("/preupload/")
        if repository != path.removeprefix("/api/"):
            return {"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in said[0]["files"]]}
        repository = path.removeprefix("/api/").partition("/commit/")[0]
        for line in said:
            if line["key"] == "file":
                value = line["value"]
                self.repositories[repository][value["path"]] = base64.b64decode(value["content"])
        name = repository.removeprefix("models/")
        return {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40}

    def _answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if "secret" in path and self.headers.get("Authorization") != "Bearer hf_secret":
            return 401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found."}
        if "gated" in path:
            return 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
        repository, _, rest = path.removeprefix("/api").lstrip("/").partition("/resolve/")
        if rest:
            kind = "" if repository.startswith("datasets/") else "models/"
            said = self.repositories.get(f"{kind}{repository}", {}).get(rest.partition("/")[2])
            if said is not None:
                digest = f"{hash(said) & (1 << 160) - 1:040x}"
                return 200, said, {"X-Repo-Commit": "a" * 40, "ETag": f'"{digest}"'}
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        kind, owner, name, verb = (*repository.split("/"), *[""] * 4)[:4]
        files = self.repositories.get(f"{kind}/{owner}/{name}")
        if files is None:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if verb == "tree":
            listed = [
                {"type": "file", "path": path, "size": len(said), "oid": "b" * 40} for path, said in files.items()
            ]
            return 200, json.dumps(listed).encode(), {}
        about = {
            "id": f"{owner}/{name}",
            "sha": "a" * 40,
            "private": files.get("visibility") == b"private",
            "siblings": [{"rfilename": path} for path in files],
        }
        return 200, json.dumps(about).encode(), {}

    def log_message(self, *_: object) -> None:
        pass
