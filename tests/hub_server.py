"""A model hub on the loopback interface, of one repository: what the Hub's client asks for, and what it was asked."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves the files of `folder` as `repo_id` at one commit. `sent` counts the bytes that left, by file name."""

    def __init__(self, folder: Path, repo_id: str = "someone/model"):
        self.folder, self.repo_id, self.sent = folder, repo_id, {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def log_message(self, *args):
                pass

            def answer(self, body: bool):
                path = self.path.split("?")[0].strip("/")
                if path.startswith("api/models/"):
                    return self.reply(*hub.api(path.removeprefix("api/models/")), body=body)
                repo_id, _, rest = path.partition("/resolve/")
                revision, _, name = rest.partition("/")
                file = hub.folder / name
                if repo_id != hub.repo_id or revision not in ("main", COMMIT) or not file.is_file():
                    code = "EntryNotFound" if repo_id == hub.repo_id else "RepoNotFound"
                    return self.reply(404, b"{}", {"X-Error-Code": code}, body=body)
                content = file.read_bytes()
                headers = {
                    "X-Repo-Commit": COMMIT,
                    "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                    "Accept-Ranges": "bytes",
                    "X-Linked-Size": str(len(content)),
                }
                status = 200
                if wanted := self.headers.get("Range"):
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    total, content = len(content), content[int(first) : int(last) + 1 if last else None]
                    headers["Content-Range"] = f"bytes {first}-{int(first) + len(content) - 1}/{total}"
                    status = 206
                if body:
                    hub.sent[name] = hub.sent.get(name, 0) + len(content)
                return self.reply(status, content, headers, body=body)

            def reply(self, status: int, content: bytes, headers: dict[str, str] = {}, body: bool = True):  # noqa: B006
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if body:
                    self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def api(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        repo_id, _, revision = path.partition("/revision/")
        if repo_id != self.repo_id:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if revision not in ("", "main", COMMIT):
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        siblings = [
            {"rfilename": f.relative_to(self.folder).as_posix()} for f in self.folder.rglob("*") if f.is_file()
        ]
        answer = {"_id": "0", "id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings, "tags": []}
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
