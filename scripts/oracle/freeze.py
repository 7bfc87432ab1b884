"""Asks upstream's llama.cpp about every case of ``kimi_gguf.reference.oracle`` and writes its answers as fixtures.

    python scripts/oracle/freeze.py --work DIR [CASE]...

DIR gets what is needed and is kept: the npm packages @wllama/wllama 3.13.0 and puppeteer-core. Node, npm and Chromium
must be there already (Debian: apt-get install nodejs npm chromium). Run it only to add cases or to change models:
a fixture that fails says that ours changed, not upstream.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kimi_gguf.reference.oracle import CASES, ROWS, Answer, OracleCase, model_digest  # noqa: E402

PACKAGE = "@wllama/wllama@3.13.0"
UPSTREAM = "llama.cpp b12211-7d7f028, WebAssembly of npm @wllama/wllama 3.13.0"
ANSWERS = ROOT / "tests" / "data" / "oracle"


def install(work: Path) -> dict[str, str]:
    """Fetch the two packages into ``work``; the environment that run_upstream.mjs needs."""
    work.mkdir(parents=True, exist_ok=True)
    esm = work / "node_modules" / "@wllama" / "wllama" / "esm"
    if not esm.is_dir() or not (work / "node_modules" / "puppeteer-core").is_dir():
        subprocess.run(["npm", "install", "--prefix", str(work), PACKAGE, "puppeteer-core"], check=True)
    return {**os.environ, "WLLAMA": str(esm), "PUPPETEER": str(work)}


def ask(case: OracleCase, work: Path, env: dict[str, str]) -> Answer:
    """Upstream's log-probabilities for a case."""
    model, prompt = case.make(work / "model.gguf"), work / "prompt.txt"
    prompt.write_text(case.prompt, encoding="ascii")
    script = Path(__file__).with_name("run_upstream.mjs")
    command = ["node", str(script), str(model), str(prompt), str(ROWS)]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["choices"][0]["logprobs"]["content"]
    if len(rows) != ROWS:
        raise SystemExit(f"{case.name}: upstream ended after {len(rows)} of {ROWS} tokens; choose another seed")
    top = [row["top_logprobs"] for row in rows]
    return Answer(
        UPSTREAM,
        model_digest(model),
        np.array([row["id"] for row in rows], np.int32),
        np.array([[entry["id"] for entry in row] for row in top], np.int32),
        np.array([[entry["logprob"] for entry in row] for row in top]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    arguments = parser.parse_args()
    env = install(arguments.work)
    ANSWERS.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if not arguments.cases or case.name in arguments.cases:
            answer = ask(case, arguments.work, env)
            text = json.dumps(answer.to_json(), separators=(",", ":"))
            (ANSWERS / f"{case.name}.json").write_text(text.replace('{"token"', '\n{"token"') + "\n", encoding="utf-8")
            print(f"{case.name}: {len(answer.tokens)} rows")


if __name__ == "__main__":
    main()
