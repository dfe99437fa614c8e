"""Holds one loaded engine and answers requests, one JSON line each, in the engine's own environment:
`PYTHON worker.py '{"engine": ..., "model": ..., "threads": ...}'`.

Needs nothing of streamspec but for its own engine. First line written: seconds of loading, the process whose memory
counts, versions. Then each request `{"prompt": ids, "limit": n, "mode": ..., "settings": ...}` gets `{"tokens": ids,
"first": s, "decode": s, "whole": s}`: seconds to the first token, from there to the last one, and of the request; or
`{"error": ...}`. Tokens may end with the end-of-text token. `"warm": true` marks a warm-up, of which streamspec learns
nothing.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

STARTED = time.perf_counter()
PATIENCE = 120.0  # seconds that a server may take to open a model
Answer = dict[str, Any]


class Streamspec:
    """Answers by the package itself: its default, plain, or drafting with n-grams alone."""

    packages = ("onnxruntime",)

    def __init__(self, config: dict[str, Any]) -> None:
        from streamspec.runtime import load

        self.session = load(config["model"], threads=config["threads"])
        self.provider = self.session.provider.name
        self.learned: dict[str, Any] = {}

    def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        if mode not in self.learned:
            self.learned[mode] = self.nothing_learned(mode)
        return self.timed(self.learned[mode], prompt, limit, mode)

    def warm(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        return self.timed(self.nothing_learned(mode), prompt, limit, mode)

    def nothing_learned(self, mode: str) -> Any:
        """How a mode decodes, and the state of a session that knows no answers. Version 0.1 kept all in the state."""
        from streamspec.runtime.decoding.policy import AdaptiveState

        policy = self.session.policy
        policy = policy.unlearned() if hasattr(policy, "unlearned") else policy
        alone = mode == "n-grams" and self.session.runner.gamma
        return policy, without_drafter(policy) if alone else AdaptiveState(policy)

    def timed(self, learned: Any, prompt: list[int], limit: int, mode: str) -> Answer:
        self.session.forget()
        with self.session.decode_with(*learned):
            started = time.perf_counter()
            done = self.session.generate(prompt, max_new_tokens=limit, speculate=mode != "plain")
            whole, stats = time.perf_counter() - started, done.stats
        steps = {"steps": stats.steps, "step_tokens": stats.step_tokens, "plain_steps": stats.plain_steps}
        return {
            "tokens": done.token_ids,
            "first": stats.prefill_seconds,
            "decode": stats.decode_seconds,
            "whole": whole,
            **steps,
        }


def without_drafter(policy: Any) -> Any:
    """What a session learns whose drafter never runs. Raises RuntimeError where it cannot be left out."""
    from streamspec.runtime.costs.drafter_gate import DrafterGate
    from streamspec.runtime.decoding.policy import AdaptiveState

    state = AdaptiveState(policy)
    if state.gate is None:
        raise RuntimeError("its drafter cannot be left out: no cost of rows was measured")
    state.gate.__class__ = type("Closed", (DrafterGate,), {"open": property(lambda self: False)})
    return state


class OnnxruntimeGenai:
    """Answers by onnxruntime-genai, plain or with its n-gram speculation (`settings`: its speculative options)."""

    packages = ("onnxruntime-genai", "onnxruntime")

    def __init__(self, config: dict[str, Any]) -> None:
        import numpy
        import onnxruntime_genai

        self.numpy, self.genai = numpy, onnxruntime_genai
        options = onnxruntime_genai.Config(config["model"])
        session = {"session_options": {"intra_op_num_threads": config["threads"]}}
        options.overlay(json.dumps({"model": {"decoder": session}}))
        self.model = onnxruntime_genai.Model(options)
        self.window = sliding_window(config["model"])

    def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        asked = self.genai.GeneratorParams(self.model)
        room = max(len(prompt) + limit, self.window)
        asked.set_search_options(max_length=room, do_sample=False)
        if mode != "plain":
            asked.set_speculative_options(**settings)
        generator = self.genai.Generator(self.model, asked)
        generator.append_tokens(self.numpy.array(prompt, dtype=self.numpy.int32))
        generator.generate_next_token()
        first = time.perf_counter()
        most = len(prompt) + limit
        while not generator.is_done() and (room == most or len(generator.get_sequence(0)) < most):
            generator.generate_next_token()
        ended = time.perf_counter()
        tokens = [int(token) for token in generator.get_sequence(0)[len(prompt) : most]]
        return {"tokens": tokens, "first": first - started, "decode": ended - first, "whole": ended - started}


def sliding_window(folder: str) -> int:
    """Tokens that the engine's cache must hold at least, or it refuses: the widest window of a model's layers."""
    with open(os.path.join(folder, "genai_config.json"), encoding="utf-8") as file:
        decoder = json.load(file)["model"]["decoder"]
    return int((decoder.get("sliding_window") or {}).get("window_size", 0))


class OpenVino:
    """Answers by OpenVINO GenAI's pipeline, plain or loaded with prompt lookup (`settings`: of its generation)."""

    packages = ("openvino-genai", "openvino")

    def __init__(self, config: dict[str, Any]) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # nobody profits from having read the prompt before
        scheduler.max_num_batched_tokens = sys.maxsize  # as without a configuration of one's own
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": config["threads"], "scheduler_config": scheduler}
        if config["mode"] != "plain":
            options["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(config["model"], "CPU", **options)
        clock = self

        class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: Any) -> Any:
                clock.came = clock.came or time.perf_counter()
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        self.streamer, self.came = Streamer(), 0.0

    def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        started, self.came = time.perf_counter(), 0.0
        options = self.pipeline.get_generation_config()
        options.max_new_tokens, options.do_sample = limit, False
        for name, value in settings.items():
            setattr(options, name, value)
        ids = self.numpy.array([prompt], dtype=self.numpy.int64)
        given = self.genai.TokenizedInputs(self.openvino.Tensor(ids), self.openvino.Tensor(self.numpy.ones_like(ids)))
        found = self.pipeline.generate(given, options, self.streamer)
        ended = time.perf_counter()
        tokens = [int(token) for token in found.tokens[0]]
        return {"tokens": tokens, "first": self.came - started, "decode": ended - self.came, "whole": ended - started}


class Transformers:
    """Answers by transformers' `generate`, plain or with prompt lookup; in fp32 also the judge of others' answers."""

    packages = ("transformers", "torch")

    def __init__(self, config: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        torch.set_num_threads(config["threads"])
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config["precision"]]
        self.model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=dtype).eval()

    def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        came: list[float] = []

        class Streamer:
            def put(self, value: Any) -> None:  # the prompt first
                came.append(time.perf_counter())

            def end(self) -> None:
                pass

        started = time.perf_counter()
        ids = self.torch.tensor([prompt])
        options = {"max_new_tokens": limit, "do_sample": False, "use_cache": True, "streamer": Streamer(), **settings}
        found = self.model.generate(ids, attention_mask=self.torch.ones_like(ids), **options)
        ended = time.perf_counter()
        tokens = [int(token) for token in found[0, len(prompt) :]]
        return {"tokens": tokens, "first": came[1] - started, "decode": ended - came[1], "whole": ended - started}

    def score(self, prompt: list[int], tokens: list[int]) -> Answer:
        """Minus the log-probability of `tokens` after `prompt`, summed."""
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            chosen = self.torch.log_softmax(logits, -1).gather(-1, self.torch.tensor(tokens)[:, None])
        return {"nll": -float(chosen.double().sum()), "count": len(tokens)}


class LlamaCpp:
    """Answers by llama.cpp's server on one slot; speculation is one of its options (`config["settings"]`).

    The server's own clock counts, which HTTP is no part of.
    """

    packages = ()

    def __init__(self, config: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [config["program"], "--model", config["model"], "--host", "127.0.0.1", "--port", str(port)]
        for option in ("--threads", "--threads-batch"):
            command += [option, str(config["threads"])]
        command += ["--parallel", "1", "--ctx-size", str(config["context"]), "--cache-ram", "0"]
        command += ["--ctx-checkpoints", "0"]  # which a prompt of a window or of states would stop for
        self.server = subprocess.Popen(
            [*command, *config["settings"].get("flags", [])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        until = time.monotonic() + PATIENCE
        while not self.ready():
            if self.server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"llama-server did not start: {' '.join(command)}")
            time.sleep(0.002)

    def ready(self) -> bool:
        try:
            self.connection.request("GET", "/health")
            found = self.connection.getresponse()
            found.read()
            return found.status == 200
        except OSError:
            self.connection.close()
            return False

    def answer(self, prompt: list[int], limit: int, mode: str, settings: dict[str, Any]) -> Answer:
        asked = {"prompt": prompt, "n_predict": limit, "cache_prompt": False, "return_tokens": True}
        asked |= {"temperature": 0.0, "samplers": ["temperature"], "stream": False}
        self.connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
        found = json.loads(self.connection.getresponse().read())
        self.connection.close()  # the server closes one that is idle for 5 s; the next request opens another
        return said(found, len(prompt))

    def close(self) -> None:
        self.server.terminate()
        self.server.wait(30)


def said(found: dict[str, Any], prompt: int) -> Answer:
    """An answer as llama.cpp's server writes it. Raises RuntimeError for anything else."""
    times = found.get("timings")
    if times is None or "tokens" not in found:
        raise RuntimeError(f"llama-server said {json.dumps(found)[:200]}")
    if times["prompt_n"] != prompt:
        raise RuntimeError(f"llama-server read {times['prompt_n']} of {prompt} tokens")
    first, decode = times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3
    return {"tokens": found["tokens"], "first": first, "decode": decode, "whole": first + decode}


ENGINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "streamspec": Streamspec,
    "llama.cpp": LlamaCpp,
    "onnxruntime-genai": OnnxruntimeGenai,
    "openvino": OpenVino,
    "transformers": Transformers,
}


@contextmanager
def own_output() -> Iterator[Any]:
    """The pipe that answers go into; whatever libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        yield pipe


def serve(engine: Any, lines: Any, say: Callable[[dict[str, Any]], None]) -> None:
    for line in lines:
        asked = json.loads(line)
        try:
            if "score" in asked:
                say(engine.score(asked["prompt"], asked["score"]))
            else:
                answer = getattr(engine, "warm", engine.answer) if asked.get("warm") else engine.answer
                say(answer(asked["prompt"], asked["limit"], asked["mode"], asked["settings"]))
        except Exception as error:  # whatever an engine raises: the one who asked decides what to do
            say({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    config = json.loads(sys.argv[1])
    with own_output() as pipe:

        def say(found: dict[str, Any]) -> None:
            print(json.dumps(found), file=pipe, flush=True)

        try:
            engine = ENGINES[config["engine"]](config)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            return
        measured = engine.server.pid if isinstance(engine, LlamaCpp) else os.getpid()
        versions = {name: version(name) for name in engine.packages}
        provider = getattr(engine, "provider", "")
        say({"load": time.perf_counter() - STARTED, "pid": measured, "versions": versions, "provider": provider})
        try:
            serve(engine, sys.stdin, say)
        finally:
            if isinstance(engine, LlamaCpp):
                engine.close()


if __name__ == "__main__":
    main()
