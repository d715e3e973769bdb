"""Playing the dream: over HTTP, and in a real browser where there is one."""

import base64
import http.client
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from test_mbarc import TINY

pytest.importorskip("ale_py")
import replaylab
from replaylab.config import read_yaml, write_yaml
from replaylab.envs.atari_rgb import PALETTE
from replaylab.errors import UsageError
from replaylab.play import Dreamer, action_of, play, serve
from replaylab.tensors import load_tensors, save_tensors

BROWSER = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("play") / "run"
    return replaylab.train("mbarc", env="atari/boxing", preset="debug", out=path, **TINY | {"epochs": 1})


@pytest.fixture(scope="module")
def server(run):
    server = serve(run, device="cpu")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, path, keys=None, **headers):
    data = None if keys is None else json.dumps(keys).encode()
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=20) as answer:
        return answer.read(), answer.headers


def test_keys_become_the_nearest_action():
    boxing = ["NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "UPFIRE", "UPRIGHTFIRE"]
    freeway = ["NOOP", "UP", "DOWN"]
    for keys, names, wanted in (
        ({"UP", "RIGHT", "FIRE"}, boxing, "UPRIGHTFIRE"),
        ({"DOWN", "RIGHT"}, boxing, "DOWN"),
        ({"UP", "LEFT", "FIRE"}, boxing, "UPLEFT"),
        ({"FIRE"}, boxing, "FIRE"),
        ({"UP", "FIRE"}, freeway, "UP"),
        ({"LEFT"}, freeway, "NOOP"),
        (set(), freeway, "NOOP"),
        ({"UP"}, ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"], "RIGHT"),  # Pong
        ({"DOWN", "FIRE"}, ["NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE"], "LEFTFIRE"),
    ):
        assert names[action_of(keys, names)] == wanted


def test_frames_rewards_and_the_chance_of_going_on(server):
    assert server.server_address[0] == "127.0.0.1"
    page, headers = ask(server, "/")
    assert b"<canvas" in page and "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"http://" not in page and b"https://" not in page  # nothing from elsewhere
    first, headers = ask(server, "/restart", [])
    assert json.loads(headers["X-Dream"]) == {"reward": 0, "score": 0, "continue": 1, "steps": 0, "action": "NOOP"}
    colours = np.frombuffer(first, np.uint8).reshape(53, 40, 3)
    assert (colours[..., None, :] == PALETTE).all(-1).any(-1).all()
    score = 0
    for i in range(1, 4):
        frame, headers = ask(server, "/step", ["UP", "nonsense"])
        told = json.loads(headers["X-Dream"])
        score += told["reward"]
        assert len(frame) == 53 * 40 * 3 and told["steps"] == i and told["action"] == "UP" and told["score"] == score
        assert told["reward"] in (-1, 0, 1) and 0 <= told["continue"] <= 1
    assert frame != first


def test_an_answer_does_not_wait_to_be_acknowledged(server):
    """A server that sends headers and body one after the other is held up for 40 ms, if the system is not told."""
    connection, spent = http.client.HTTPConnection(*server.server_address[:2], timeout=20), []
    for _ in range(21):
        began = time.perf_counter()
        connection.request("GET", "/")
        assert b"<canvas" in connection.getresponse().read()
        spent.append(time.perf_counter() - began)
    connection.close()
    assert sorted(spent)[10] < 0.025


@pytest.mark.parametrize(
    ("path", "body", "headers", "code"),
    [
        ("/step", b"{", {}, 400),
        ("/step", b"5", {}, 400),
        ("/step", b"[" * 9000, {}, 400),
        ("/other", b"[]", {}, 404),
        ("/../config.yaml", None, {}, 404),
        ("/", None, {"Host": "evil.example"}, 403),
        ("/", None, {"Host": "127.0.0.1.evil.example:80"}, 403),
        ("/step", b"[]", {"Origin": "http://evil.example"}, 403),
        ("/step", b"[]", {"Origin": "http://localhost:1"}, 403),  # another page on this machine
    ],
)
def test_strangers_and_nonsense_are_refused(server, path, body, headers, code):
    url = f"http://127.0.0.1:{server.server_address[1]}{path}"
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20)
    assert error.value.code == code


def test_a_client_that_leaves_is_no_error(server, capfd):
    for _ in range(5):
        with socket.create_connection(server.server_address[:2]) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
            client.sendall(b"POST /step HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 2\r\n\r\n[]")
    time.sleep(1)
    assert "Traceback" not in capfd.readouterr().err


def test_a_tunnel_may_have_another_port(server):
    assert b"<html" in ask(server, "/", Host="localhost:9000")[0]
    assert ask(server, "/step", [], Host="localhost:9000", Origin="http://localhost:9000")[0]


def test_what_cannot_be_played_is_told(run, server, tmp_path):
    with pytest.raises(UsageError, match="cannot listen on port"):
        serve(run, server.server_address[1], "cpu")
    with pytest.raises(UsageError):
        play(tmp_path / "nothing")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    weights = next((other / "checkpoints").glob("*")) / "weights.safetensors"
    for path in (other / "checkpoints").glob("*/weights.safetensors"):
        untrained = load_tensors(path)
        untrained["trained"].zero_()
        save_tensors(path, untrained)
    with pytest.raises(UsageError, match="not trained yet"):
        Dreamer(other, "cpu")
    shutil.rmtree(weights.parent.parent)
    with pytest.raises(UsageError, match="no checkpoint yet"):
        Dreamer(other, "cpu")
    write_yaml(other / "config.yaml", read_yaml(other / "config.yaml") | {"system": "bc"})
    with pytest.raises(UsageError, match="no world to play in"):
        Dreamer(other, "cpu")


def test_without_a_terminal_the_address_is_told_at_once(run):
    command = [sys.executable, "-m", "replaylab", "play", str(run), "--device", "cpu"]
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=plain)
    try:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "nothing was printed"
        address = process.stdout.readline().split()[2]
        assert b"<canvas" in urllib.request.urlopen(address, timeout=20).read()
    finally:
        process.terminate()
        process.wait(20)


# --- a real browser, spoken to through pipes


class Browser:
    def __init__(self, profile):
        (inbox, self.write), (self.read, outbox) = os.pipe(), os.pipe()

        def wire():  # the browser listens on descriptor 3 and answers on 4
            os.dup2(inbox, 13)
            os.dup2(outbox, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip
        self.process = subprocess.Popen(
            [BROWSER, *flags], preexec_fn=wire, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(inbox)
        os.close(outbox)
        self.count, self.rest, self.session = 0, b"", None

    def call(self, method, **parameters):
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.read, 1 << 20)
                assert part, "the browser closed"
                self.rest += part
            line, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(line)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def value(self, expression):
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait(self, expression, seconds=30):
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"{expression} never came true"
            time.sleep(0.1)
        return found

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.read)
        os.close(self.write)


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_arrow_keys_drive_the_dream_in_a_browser(server, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
        text = "document.getElementById('{}').textContent"
        browser.wait(f"document.readyState == 'complete' && Number({text.format('steps')}) > 2")
        assert browser.value(text.format("action")) == "NOOP"
        assert "boxing" in browser.value(text.format("title"))
        key = {"key": "ArrowUp", "code": "ArrowUp", "windowsVirtualKeyCode": 38}
        browser.call("Input.dispatchKeyEvent", type="keyDown", **key)
        browser.wait(f"{text.format('action')} == 'UP'")
        browser.call("Input.dispatchKeyEvent", type="keyUp", **key)
        browser.wait(f"{text.format('action')} == 'NOOP'")
        assert browser.value(text.format("continue")).endswith("%") and browser.value(text.format("reward")) is not None
        lit = "[...screen_.getContext('2d').getImageData(0, 0, 40, 53).data].filter(v => v > 0 && v < 255).length"
        assert browser.value(lit) > 100  # something is drawn
        steps = int(browser.value(text.format("steps")))
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="r", code="KeyR", windowsVirtualKeyCode=82)
        browser.wait(f"Number({text.format('steps')}) < {steps}")
        picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
        assert picture[:4] == b"\x89PNG"
    finally:
        browser.close()
