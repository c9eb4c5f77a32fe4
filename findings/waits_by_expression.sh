#!/usr/bin/env bash
# Playwright 1.65.2 waits for a function and for an expression alike, until the page has a policy against eval: `wait_for_function("window.late")`
# then works if the expression is true at once, and fails with an EvalError as soon as it has to be asked again. So a test passes on a fast
# machine and fails on a slow one, with another message than a timeout. `wait_for_function("() => window.late")` waits.
# Needs a Chromium in the PATH (or $CHROMIUM).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"; "$folder/venv/bin/pip" install -q playwright==1.65.2
cat > "$folder/ask.py" <<'PY'
import http.server, os, shutil, threading
from playwright.sync_api import Error, sync_playwright

SCRIPT = b"window.early = true; setTimeout(() => { window.late = true; }, 700);"


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = SCRIPT if self.path == "/own.js" else b"<!doctype html><script src=/own.js></script>"
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if body is SCRIPT else "text/html")
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
seen = {}
with sync_playwright() as playwright:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    for what in ("window.early", "() => window.early", "window.late", "() => window.late"):
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        try:
            page.wait_for_function(what, timeout=5000)
            seen[what] = "waited"
        except Error as error:
            seen[what] = "EvalError" if "EvalError" in str(error) else "another error"
        print(f"{what}: {seen[what]}")
        page.close()
    browser.close()
assert list(seen.values()) == ["waited", "waited", "EvalError", "waited"]
PY
"$folder/venv/bin/python" "$folder/ask.py"
