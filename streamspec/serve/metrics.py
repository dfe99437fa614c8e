"""Renders the server's counters as text for Prometheus."""

from __future__ import annotations

from streamspec.serve.pool import Pool

HELP = {
    "requests_total": ("counter", "Generations by how they ended; refused: the queue was full."),
    "sessions": ("gauge", "Sessions by what they do; unopened ones have used no memory yet."),
    "bundles": ("gauge", "Bundles by whether they are in memory."),
    "waiting_requests": ("gauge", "Requests in the queue."),
    "grammar_checks_total": ("counter", "Grammars of requests by what their check said; kept: it was known."),
    "waiting_grammars": ("gauge", "Grammars that are checked now, and those whose build an answer waits for."),
    "grammars_total": ("counter", "Grammars that were asked for, by whether they could be built."),
    "grammar_seconds_total": ("counter", "Time spent building grammars."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "reused_tokens_total": ("counter", "Tokens of prompts that lay in a cache."),
    "new_tokens_total": ("counter", "Tokens written."),
    "steps_total": ("counter", "Verification steps."),
    "step_tokens_total": ("counter", "Tokens that verification steps committed."),
    "plain_steps_total": ("counter", "Calls that brought one token."),
    "shared_steps_total": ("counter", "Steps of either kind in a call that other answers shared."),
    "prefill_seconds_total": ("counter", "Time spent on prompts."),
    "decode_seconds_total": ("counter", "Time spent on answers."),
}


def render(pool: Pool) -> str:
    """Writes the counters and gauges of `pool` in the Prometheus text format."""
    counts = pool.counts
    slots = pool.slots
    builds = [session.vocabulary.builds for session in pool.bases]
    loaded = [session.loaded for session in pool.bases]
    values: dict[str, dict[str, float]] = {
        "requests_total": {
            f'result="{name}"': getattr(counts, name) for name in ("finished", "failed", "cancelled", "refused")
        },
        "sessions": {
            'state="busy"': sum(slot.busy for slot in slots),
            'state="idle"': sum(not slot.busy and slot.session is not None for slot in slots),
            'state="unopened"': sum(not slot.busy and slot.session is None for slot in slots),
        },
        "bundles": {'state="loaded"': loaded.count(True), 'state="unloaded"': loaded.count(False)},
        "waiting_requests": {"": len(pool.waiting)},
        "grammar_checks_total": {
            f'result="{name}"': getattr(pool.grammars, name) for name in ("passed", "refused", "kept")
        },
        "waiting_grammars": {
            'for="check"': pool.grammars.waiting,
            'for="build"': sum(build.waiting for build in builds),
        },
        "grammars_total": {
            'result="built"': sum(build.built for build in builds),
            'result="refused"': sum(build.refused for build in builds),
        },
        "grammar_seconds_total": {"": sum(build.seconds for build in builds)},
    }
    lines = []
    for name, (kind, description) in HELP.items():
        lines += [f"# HELP streamspec_{name} {description}", f"# TYPE streamspec_{name} {kind}"]
        for labels, value in values.get(name, {"": counts.totals.get(name.removesuffix("_total"), 0)}).items():
            lines.append(f"streamspec_{name}{{{labels}}} {value}" if labels else f"streamspec_{name} {value}")
    return "\n".join(lines) + "\n"
