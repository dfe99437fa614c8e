"""`streamspec doctor`: reports what this machine can do, and whether it computes a bundle correctly."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from streamspec.cli.option_flags import Flags, with_flags
from streamspec.cli.shared_options import BUNDLE, Precision, folder_of
from streamspec.runtime.options import LoadOptions


@with_flags
def command(
    *,
    bundle: Annotated[
        str | None,
        typer.Argument(help=f"{BUNDLE}, to test on every provider."),
    ] = None,
    precision: Precision = None,
    loading: Annotated[LoadOptions, Flags(only=("threads",))],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Show what this machine can run: processor, memory, ONNX Runtime, providers; with BUNDLE, test each provider.

    Exit code 1 if no provider computes it correctly.
    """
    from streamspec.cli.tables import print_facts
    from streamspec.progress import track
    from streamspec.runtime import doctor
    from streamspec.runtime.folder_forms import form_of, read_folder
    from streamspec.runtime.hardware.providers import fitting

    machine = doctor.machine()
    providers = doctor.providers() if machine["onnxruntime"] else []
    tried: list[dict[str, Any]] | None = None
    if bundle is not None:
        folder = folder_of(bundle, precision)
        folder, manifest = read_folder(folder)
        with form_of(manifest).checked(folder, manifest, True, None):
            names, _ = fitting(manifest.flavour)
        tried = [
            doctor.examine(folder, manifest, name, loading.threads) for name in track(names, "providers", len(names))
        ]
    if as_json:
        print(json.dumps({"machine": machine, "providers": providers, "bundle": tried}))
    else:
        print_facts(about(machine), "machine")
        print_facts(
            [
                (
                    provider["name"],
                    "usable" if provider["usable"] else provider["why_not"],
                    ", ".join(provider["flavours"]),
                )
                for provider in providers
            ],
            "providers",
            ("provider", "here", "bundles"),
        )
        if tried is not None:
            headings = ("provider", "computes", "plain step", "small nodes on the CPU")
            print_facts([outcome(report) for report in tried], str(bundle), headings)
    if tried is not None and not any(report["right"] for report in tried):
        raise SystemExit(1)


def about(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of name and value that describe the machine in words."""

    def value(name: str, unit: str = "") -> str:
        return "unknown" if machine[name] is None else f"{machine[name]}{unit}"

    def whether(name: str, true: str, false: str) -> str:
        return "unknown" if machine[name] is None else true if machine[name] else false

    sets, wheels = machine["instruction_sets"], machine["wheels"]
    version = value("onnxruntime") if machine["onnxruntime"] else 'not installed: pip install "streamspec[cpu]"'
    clash = f"; {' and '.join(wheels)} overwrite each other: uninstall all, install one" if len(wheels) > 1 else ""
    place = f", in {machine['onnxruntime_path']}" if machine["onnxruntime"] else ""
    kernels, lacking = machine["native_operators"], machine["native_operators_why_not"]
    native = f"yes ({kernels})" if kernels else f"no, bundles run the standard ones, slower: {lacking}"
    return [
        ("streamspec", f"{machine['streamspec']}, Python {machine['python']}, {value('system')}"),
        ("processor", value("processor")),
        ("cores", f"{machine['physical_cores']} physical, {machine['logical_cores']} logical"),
        ("instruction sets", "unknown" if sets is None else ", ".join(sets) or "none that products profit from"),
        (
            "int8 products",
            whether("products_saturate", "saturate: int8 is kept exact at a third of its speed", "exact"),
        ),
        ("native operators", native),
        ("memory", f"{value('memory_mb', ' MB')}, free {value('memory_free_mb', ' MB')}"),
        ("huge pages", whether("huge_pages", "on request", "not offered")),
        ("ONNX Runtime", f"{version}{f' ({wheels[0]})' if len(wheels) == 1 else ''}{clash}{place}"),
        (
            "telemetry",
            whether("telemetry_off", "off", "not turned off: ORT_DISABLE_TELEMETRY is set to something else than 1"),
        ),
        (
            "cache",
            (machine["cache"] or "none")
            + ("" if machine["cache_writable"] else " (cannot be written: measurements are made anew at every load)"),
        ),
    ]


def outcome(report: dict[str, Any]) -> tuple[str, str, str, str]:
    """One row of the table of providers: how it computes the bundle, and how fast."""
    if not report["right"]:
        return report["name"], report["verdict"], "", ""
    why_not = report["why_not_captured"]
    graph = ", captured" if report["captured"] else f", not captured: {why_not}" if why_not else ""
    return report["name"], f"rightly{graph}", f"{report['plain_ms']:.2f} ms", str(report["on_cpu"])
