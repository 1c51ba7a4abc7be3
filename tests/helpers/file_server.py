"""A small local server of files that records requests and fails as told."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class FileServer:
    """A server of `files` ({path: bytes}) at `url`, while its `with` block runs.

    Attributes:
        cuts: {path: [how many bytes to send before hanging up, for each of the next requests]}.
        errors: {path: status to answer with}.
        etags, dates: {path: ETag}, {path: date of change}; a file without one is sent without.
        unannounced: paths of files that are sent without their length.
        ranges: whether Range is obeyed.
        conditions: whether If-Range is obeyed; if not, a part of a changed file is sent.
        shifts: {path: how many bytes later than asked for the next partial answer starts}.
        log: (path, Range header, If-Range header) of each request.
    """

    def __init__(self):
        self.files, self.cuts, self.errors, self.etags, self.dates = {}, {}, {}, {}, {}
        self.unannounced = set()
        self.shifts = {}
        self.ranges = self.conditions = True
        self.log = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.told = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self):
        Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def paths(self):
        return [path for path, _, _ in self.log]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        told = self.server.told
        wanted, if_range = self.headers.get("Range"), self.headers.get("If-Range")
        told.log.append((self.path, wanted, if_range))
        status = told.errors.get(self.path, 200 if self.path in told.files else 404)
        if status != 200:
            return self.send_error(status)
        content, start = told.files[self.path], 0
        known = told.etags.get(self.path), told.dates.get(self.path)
        is_same = if_range in known and not (if_range or "").startswith("W/")
        if wanted and told.ranges and (is_same or not told.conditions):
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            start += told.shifts.pop(self.path, 0)
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.path in told.etags:
            self.send_header("ETag", told.etags[self.path])
        if self.path in told.dates:
            self.send_header("Last-Modified", told.dates[self.path])
        if self.path not in told.unannounced:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cuts = told.cuts.get(self.path)
        end = start + cuts.pop(0) if cuts else len(content)
        self.wfile.write(content[start:end])
