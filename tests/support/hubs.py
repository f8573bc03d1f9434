"""A hub on loopback: the real one is not reached from here."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs

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
        if "/paths-info/" in self.path:
            return self._sent(200, self._about(self.path, parse_qs(said)["paths"]))
        code, answer = 401, {"error": "Invalid username or password."}
        if self.headers.get("Authorization") == "Bearer hf_may_write":
            code, answer = 200, self._written(self.path, [json.loads(line) for line in said.splitlines()])
        return self._sent(code, answer)

    def _sent(self, code: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _about(self, path: str, paths: list[str]) -> list[dict]:
        files = self.repositories[path.removeprefix("/api/").partition("/paths-info/")[0]]
        return [
            {"type": "file", "path": one, "size": len(files[one]), "oid": "b" * 40} for one in paths if one in files
        ]

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
            return self._tree(files, "/".join(repository.split("/")[5:]))
        about = {
            "id": f"{owner}/{name}",
            "sha": "a" * 40,
            "private": files.get("visibility") == b"private",
            "siblings": [{"rfilename": path} for path in files],
        }
        return 200, json.dumps(about).encode(), {}

    def _tree(self, files: dict[str, bytes], folder: str) -> tuple[int, bytes, dict[str, str]]:
        """What is in a folder; with `recursive` also in those below it."""
        within = f"{folder}/" if folder else ""
        listed = [
            {"type": "file", "path": path, "size": len(said), "oid": f"{hash(said) & (1 << 160) - 1:040x}"}
            for path, said in files.items()
            if path.startswith(within)
        ]
        if folder and not listed:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        if "recursive=true" not in self.path.lower():
            below = {within + one["path"].removeprefix(within).partition("/")[0] for one in listed} - {*files}
            listed = [one for one in listed if "/" not in one["path"].removeprefix(within)]
            listed += [{"type": "directory", "path": path, "oid": "c" * 40} for path in sorted(below)]
        return 200, json.dumps(listed).encode(), {}

    def log_message(self, *_: object) -> None:
        pass
