"""Shows that a service survives its workers: clients ask for minutes while one worker after another is killed.

    python scripts/show_cluster.py [--model GGUF] [--requests 200] [--clients 4] [--workers 3] [--kill-every 60]

The trained tiny model is served over workers of this machine. Every answer must be right (the greedy text of its
prompt, as the undisturbed service gave it) or a clean error: status 503 with a message, or for a streamed one an error
event at its end; nothing may hang, the service must be back within 30 s of each
kill, and no process may be left. Exits with 1 otherwise. The model is float32, where a greedy text does not depend on
what else is in the batch; with BF16 or quantized weights near-ties fall one way or the other.
"""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPTS = (
    "It was a truth",
    "She had been",
    "Mr. Darcy said",
    "The family of",
    "They were all",
    "Emma could not",
    "There was no",
    "Her sister was",
)
TOKENS = 48
LIMIT = 30.0
GOOD = ("right", "status 503", "error event")


class CleanError(Exception):
    """The service said that it has no answer."""


class Show:
    """One run: the processes, what clients saw, how long each recovery took."""

    def __init__(self, folder: Path, model: Path, workers: int, clients: int) -> None:
        ports = free_ports(workers + 1)
        self.port, self.endpoints = ports[0], [f"127.0.0.1:{port}" for port in ports[1:]]
        self.logs = [folder / f"worker-{i}.txt" for i in range(workers)] + [folder / "serve.txt"]
        self.workers = [
            start(["cluster", "worker", "--bind", endpoint, "--threads", "1"], log)
            for endpoint, log in zip(self.endpoints, self.logs, strict=False)
        ]
        for log in self.logs[:-1]:
            wait(lambda log=log: "worker at" in log.read_text(), 60)
        arguments = ["serve", str(model), "--port", str(self.port), "--rpc", ",".join(self.endpoints)]
        arguments += ["--parallel", str(clients), "--threads", "1", "--context", "512"]
        self.head = start([*arguments, "--log", str(folder / "serve.log")], self.logs[-1])
        wait(self.healthy, 120)
        self.right = {prompt: self.ask(prompt) for prompt in PROMPTS}
        self.seen: Counter[str] = Counter()
        self.slowest = 0.0
        self.recoveries: list[float] = []

    def ask(self, prompt: str, streamed: bool = False) -> str:
        """The greedy continuation; raises ``CleanError`` for an error with a message, else what went wrong."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            body = {
                "prompt": prompt,
                "n_predict": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": streamed,
                "cache_prompt": False,
            }
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            if response.status != 200:
                if json.loads(data)["error"]["message"]:
                    raise CleanError(f"status {response.status}")
                raise ValueError("an error without a message")
            if not streamed:
                return str(json.loads(data)["content"])
            events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
            if "error" in events[-1]:
                raise CleanError("error event")
            if not events[-1]["stop"]:
                raise ValueError("a stream without an end")
            return "".join(event["content"] for event in events)
        finally:
            connection.close()

    def healthy(self) -> bool:
        """Whether the service answers a health check well."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def client(self, numbers: list[int], pause: float) -> None:
        """Ask for the prompts of these request numbers."""
        for number in numbers:
            prompt = PROMPTS[number % len(PROMPTS)]
            begin = time.monotonic()
            try:
                # Of each prompt, every other request is streamed.
                streamed = number // len(PROMPTS) % 2 == 1
                outcome = "right" if self.ask(prompt, streamed) == self.right[prompt] else "wrong"
            except CleanError as error:
                outcome = str(error)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            self.slowest = max(self.slowest, time.monotonic() - begin)
            self.seen[outcome] += 1
            time.sleep(pause)

    def kill_one(self) -> None:
        """kill -9 of a random worker's server, and the time until the service is back."""
        victim = random.choice(self.workers)
        for pid in children(victim.pid):
            os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        wait(lambda: not self.healthy(), 30)
        wait(self.healthy, 120)
        self.recoveries.append(time.monotonic() - begin)
        print(f"killed a worker, back after {self.recoveries[-1]:.1f} s; so far {dict(self.seen)}", flush=True)

    def stop(self) -> list[int]:
        """End everything; ids of processes that live on."""
        processes = [self.head, *self.workers]
        pids = [pid for process in processes for pid in (process.pid, *children(process.pid))]
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "kimi_gguf", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    # However this ends, its supervisors end, and with them what they started.
    atexit.register(process.terminate)
    return process


def wait(holds, seconds: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {seconds:g} s")
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def free_ports(count: int) -> list[int]:
    """Ports with a free one after each."""
    found: list[int] = []
    held: list[socket.socket] = []
    while len(found) < count:
        first, second = socket.socket(), socket.socket()
        held += [first, second]
        first.bind(("127.0.0.1", 0))
        with suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            found.append(first.getsockname()[1])
    for each in held:
        each.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=4.0, help="over which the requests are spread")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="show-cluster-") as name:
        folder = Path(name)
        model = chosen.model or folder / "tiny.gguf"
        if chosen.model is None:
            arguments = ["convert", "kimi_gguf/data/tiny-k31", "--quant", "F32", "--outfile", str(model), "-q"]
            subprocess.run([sys.executable, "-m", "kimi_gguf", *arguments], cwd=ROOT, check=True)
        show = Show(folder, model, chosen.workers, chosen.clients)
        pause = chosen.minutes * 60 * chosen.clients / chosen.requests
        shares = [list(range(i, chosen.requests, chosen.clients)) for i in range(chosen.clients)]
        threads = [threading.Thread(target=show.client, args=(share, pause), daemon=True) for share in shares]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        kills = 0
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            if time.monotonic() - begin > (kills + 1) * chosen.kill_every:
                kills += 1
                show.kill_one()
        left = show.stop()
    print(f"{sum(show.seen.values())} requests: {dict(show.seen)}; slowest {show.slowest:.1f} s")
    print(f"{kills} kills; back after {', '.join(f'{s:.1f}' for s in show.recoveries)} s; processes left: {left}")
    good = set(show.seen) <= set(GOOD) and not left and all(s < LIMIT for s in show.recoveries)
    return 0 if good and kills and sum(show.seen.values()) == chosen.requests else 1


if __name__ == "__main__":
    sys.exit(main())
