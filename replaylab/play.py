"""`replaylab play RUN`: a person plays the dream. One page, served to this machine alone.

The page asks for the next frame about fifteen times a second and says which keys are down; the world model answers
with a picture, the reward and the chance that the game goes on. The dream begins with the first four frames of a real
game and from then on is the model's own.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaylab.errors import UsageError
from replaylab.evaluate import load_agent, pick_device
from replaylab.models.dream import pictures
from replaylab.models.reward import likeliest
from replaylab.run import RunFolder

KEYS = ("UP", "RIGHT", "LEFT", "DOWN", "FIRE")
MOST = 10_000  # bytes that a request may have


def action_of(keys: set[str], names: list[str]) -> int:
    """The game's action for the keys that are down: the nearest one it has, 0 (nothing) where it has none. Where a game
    knows no up and down, as Pong, whose RIGHT is up, those keys are right and left."""
    if not any("UP" in name or "DOWN" in name for name in names):
        keys = {{"UP": "RIGHT", "DOWN": "LEFT"}.get(key, key) for key in keys}
    vertical = next((k for k in ("UP", "DOWN") if k in keys), "")
    sideways = next((k for k in ("RIGHT", "LEFT") if k in keys), "")
    fire = "FIRE" if "FIRE" in keys else ""
    both = vertical + sideways
    wishes = (both + fire, both, vertical + fire, sideways + fire, vertical, sideways, fire)
    return next((names.index(wish) for wish in wishes if wish and wish in names), 0)


class Dreamer:
    """The dream of one player."""

    def __init__(self, run: str | Path, device: str = "auto"):
        folder = RunFolder(run).require()
        config = folder.config()
        if config.get("system") != "mbarc":
            raise UsageError(f"{run} was trained with {config.get('system')}, which has no world to play in")
        if not folder.checkpoints():
            raise UsageError(f"{run} has no checkpoint yet: there is no world to play in")
        self.agent, _, _ = load_agent(folder, pick_device(device))
        if not int(self.agent.trained):
            raise UsageError(f"the world model of {run} is not trained yet: train on, then play")
        from replaylab import envs

        self.env = envs.make_vec(config["env"], 1)
        self.names = [action.name for action in self.env.games[0].actions]
        self.title, self.games, self.lock = config["env"], 0, threading.Lock()
        self.restart()

    def restart(self) -> dict[str, Any]:
        with self.lock:
            self.env.reset(seed=self.games)
            self.games += 1
            seen = torch.as_tensor(self.env.showing, device=self.agent.device)
            shrink = self.agent.config.shrink
            world = self.agent.world
            self.stack = pictures(seen[..., ::shrink, ::shrink], world.colours, world.shape.pixels)
            self.steps, self.score = 0, 0.0
            return self._told(0.0, 1.0, 0)

    def step(self, keys: set[str]) -> dict[str, Any]:
        with self.lock:
            action = action_of(keys, self.names)
            world = self.agent.world
            told = world.predict(self.stack, torch.tensor([action], device=self.agent.device))
            channels = self.stack.shape[1] // world.shape.stack
            newest = told.next_frame.view(1, channels, *self.stack.shape[2:])
            self.stack = torch.cat([self.stack[:, channels:], newest], 1)
            self.steps += 1
            reward = float(likeliest(told.reward_logits))
            self.score += reward
            return self._told(reward, float(told.continues), action)

    def _told(self, reward: float, going: float, action: int) -> dict[str, Any]:
        about = {"reward": reward, "score": self.score, "continue": round(going, 4), "steps": self.steps}
        return about | {"action": self.names[action]}

    def picture(self) -> bytes:
        """The newest frame as RGB bytes, row by row."""
        with self.lock:
            stack = self.stack[0].cpu().numpy()
        if self.agent.config.pixels == "rgb":
            return np.moveaxis(stack[-3:], 0, -1).tobytes()
        return self.agent.palette[stack[-1]].tobytes()

    @property
    def size(self) -> tuple[int, int]:
        return self.agent.size


def serve(run: str | Path, port: int = 0, device: str = "auto") -> ThreadingHTTPServer:
    """A server on 127.0.0.1, not yet running. Port 0: any free one."""
    dreamer = Dreamer(run, device)
    height, width = dreamer.size
    about = {"title": dreamer.title, "width": width, "height": height, "actions": dreamer.names}
    page = PAGE.replace("ABOUT", json.dumps(about).replace("<", "\\u003c")).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # one connection for all frames
        disable_nagle_algorithm = True  # else a frame waits 40 ms until its headers are acknowledged

        def _answer(self, code: int, body: bytes, kind: str, **headers: str) -> None:
            self.send_response(code)
            policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
            for name, value in {
                "Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store",
                "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", **headers,
            }.items():  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _ours(self) -> bool:
            """Whether a page of ours asks: another site must not reach in under a name that points here."""
            host = self.headers.get("Host") or ""  # its port may be another, at the far end of a tunnel
            origin = (self.headers.get("Origin") or "").removeprefix("http://")
            return host.rpartition(":")[0] in ("127.0.0.1", "localhost") and origin in ("", host)

        def do_GET(self) -> None:
            if not self._ours():
                self._answer(403, b"only for this machine", "text/plain")
            elif self.path == "/":
                self._answer(200, page, "text/html; charset=utf-8")
            else:
                self._answer(404, b"not here", "text/plain")

        def do_POST(self) -> None:
            actions: dict[str, Callable[[set[str]], dict[str, Any]]] = {
                "/step": dreamer.step,
                "/restart": lambda keys: dreamer.restart(),
            }
            if not self._ours():
                return self._answer(403, b"only for this machine", "text/plain")
            if self.path not in actions:
                return self._answer(404, b"not here", "text/plain")
            try:
                body = self.rfile.read(max(0, min(int(self.headers.get("Content-Length") or 0), MOST)))
                keys = {key for key in json.loads(body or b"[]") if key in KEYS}
            except (ValueError, TypeError, RecursionError):
                return self._answer(400, b"send a JSON list of keys", "text/plain")
            about = actions[self.path](keys)
            self._answer(200, dreamer.picture(), "application/octet-stream", **{"X-Dream": json.dumps(about)})

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a tab that was closed
                super().handle()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on port {port}: {error}") from error


def play(run: str | Path, port: int = 0, device: str = "auto") -> None:
    """Serve the page until Ctrl-C. No window is opened: the address is printed, at once even without a terminal."""
    server = serve(run, port, device)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    print(f"play at {address}  (arrow keys, space, R restarts; Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Play the dream</title><style>
body{margin:0;min-height:100vh;display:grid;place-content:center;gap:10px;background:#11151b;color:#e4e9f0;
font:16px/1.5 system-ui,sans-serif;text-align:center}
canvas{width:min(90vw,54vh);image-rendering:pixelated;border:3px solid #2d3643;border-radius:6px;
margin:auto;display:block}
canvas.plus{border-color:#28c85a}canvas.minus{border-color:#dc3228}
h1{font-size:1.1rem;margin:0}p{margin:0;color:#9aa7b8}b{color:#e4e9f0;font-variant-numeric:tabular-nums}
#over{color:#ffd58a;visibility:hidden}
</style></head><body><h1 id="title"></h1><canvas id="screen"></canvas>
<p>reward <b id="reward">0</b> · score <b id="score">0</b> · goes on <b id="continue">100 %</b>
· <b id="action">NOOP</b> · step <b id="steps">0</b> · <b id="fps">–</b> frames a second</p>
<p id="over">The model says that the game is over.</p>
<p>Arrow keys move, space fires, R starts a new dream.</p>
<script>
const about = ABOUT, keys = new Set(), get = id => document.getElementById(id);
const names = {ArrowUp: "UP", ArrowRight: "RIGHT", ArrowLeft: "LEFT", ArrowDown: "DOWN", " ": "FIRE"};
const screen_ = get("screen"), context = screen_.getContext("2d");
let restart = false, last = performance.now(), rate = 0;
screen_.width = about.width; screen_.height = about.height;
get("title").textContent = about.title + ", dreamt";
const picture = context.createImageData(about.width, about.height);
addEventListener("keydown", e => {
  if (e.key === "r" || e.key === "R") restart = true;
  if (e.key in names) { keys.add(names[e.key]); e.preventDefault(); }
});
addEventListener("keyup", e => keys.delete(names[e.key]));
addEventListener("blur", () => keys.clear());
function show(bytes, told) {
  for (let i = 0, j = 0; i < bytes.length; i += 3, j += 4) {
    picture.data[j] = bytes[i]; picture.data[j + 1] = bytes[i + 1]; picture.data[j + 2] = bytes[i + 2];
    picture.data[j + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
  for (const id of ["reward", "score", "action", "steps"]) get(id).textContent = told[id];
  get("continue").textContent = Math.round(100 * told.continue) + " %";
  get("over").style.visibility = told.continue < 0.5 ? "visible" : "hidden";
  screen_.className = told.reward > 0 ? "plus" : told.reward < 0 ? "minus" : "";
}
async function next() {
  const began = performance.now(), path = restart ? "/restart" : "/step";
  restart = false;
  try {
    const answer = await fetch(path, {method: "POST", body: JSON.stringify([...keys])});
    if (!answer.ok) throw new Error(await answer.text());
    show(new Uint8Array(await answer.arrayBuffer()), JSON.parse(answer.headers.get("X-Dream")));
    const now = performance.now();
    rate = 0.9 * rate + 100 / Math.max(now - last, 1); last = now;
    get("fps").textContent = Math.round(rate);
    setTimeout(next, Math.max(0, 60 - (now - began)));
  } catch (error) { get("title").textContent = "The server does not answer: " + error.message; setTimeout(next, 1000); }
}
next();
</script></body></html>
"""
