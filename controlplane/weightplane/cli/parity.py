"""``weightplane parity``: whether engine and trainer compute the same policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightplane.v1 import fleet_pb2
from weightplane.v1.common_pb2 import CachePolicy, PauseMode

from .client import DEFAULT_ADDRESS, AddressOption, JsonOption, connect, interrupted, one_of
from .exits import Exit
from .output import complain, console, emit_json, table

if TYPE_CHECKING:
    from weightplane.parity.running import Asked

__all__ = ["register"]

UrlOption = Annotated[str, typer.Option("--url", help="Where vLLM's server listens.")]
DEFAULT_URL = "http://127.0.0.1:8000"
_REPORT = Path("parity-report")
_RERUNS = {
    "rescored": "rescored (by the engine, as a prompt, without its cache)",
    "fresh": "fresh (the other engine's scores of the same tokens)",
}
_START = "start it with VLLM_SERVER_DEV_MODE=1, or name its address with --url"

app = typer.Typer(
    help="Whether engine and trainer compute the same policy.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def audit(
    url: UrlOption = DEFAULT_URL,
    declare: Annotated[
        list[str] | None,
        typer.Option("--declare", help="name=value: what the group declares, where not the default. Repeatable."),
    ] = None,
    cache: Annotated[str, typer.Option("--cache", help="Cache policy that updates use: clear, keep or salt.")] = "",
    pause: Annotated[str, typer.Option("--pause", help="Pause mode that updates use: keep, wait or abort.")] = "",
    group: Annotated[
        str, typer.Option("--group", "-g", help="Take from this group what is not given: declarations, cache, pause.")
    ] = "",
    address: AddressOption = DEFAULT_ADDRESS,
    as_json: JsonOption = False,
) -> None:
    """Judge an engine against what its group declares. Exit 4 if a setting is not as declared, 3 if none answers."""
    from weightplane.inference_agent.engines.vllm.audit import audit as judge
    from weightplane.inference_agent.engines.vllm.reading import EngineUnreadable, read_server
    from weightplane.inference_agent.engines.vllm.settings import declared_from

    one_of("--cache", cache, ("", "clear", "keep", "salt"))
    one_of("--pause", pause, ("", "keep", "wait", "abort"))
    told = _policy(group, address, as_json)
    cache, pause = cache or _word(CachePolicy, told.cache), pause or _word(PauseMode, told.pause)
    try:
        declared = declared_from([*(f"{k}={v}" for k, v in sorted(told.declared.items())), *(declare or [])])
    except ValueError as error:
        raise typer.BadParameter(f"--declare {error}") from None
    try:
        # What a publish does that does not say is the group's: by default clear, keep.
        found = replace(read_server(url), cache_policy=cache or "clear", pause_mode=pause or "keep")
    except EngineUnreadable as error:
        code = Exit.REFUSED if error.reachable else Exit.UNREACHABLE
        complain(str(error), "" if error.reachable else "UNREACHABLE", code, as_json, _START)
    conditions = judge(found, declared)
    wrong = [c for c in conditions if c.status == "False"]
    unknown = [c for c in conditions if c.status == "Unknown"]
    if as_json:
        emit_json(
            {
                "ok": not wrong,
                "settings": asdict(found),
                "declared": asdict(declared),
                "conditions": [asdict(c) for c in conditions],
            }
        )
    else:
        rows = [[c.type, {"True": "ok", "False": "NO"}.get(c.status, "?"), c.message, c.setting] for c in conditions]
        table(f"parity audit of {url}", ["condition", "", "found, and why it matters", "set"], rows)
        console.print(f"{len(wrong)} not as declared, {len(unknown)} not known")
    if wrong:
        raise typer.Exit(Exit.REFUSED)


def _policy(group: str, address: str, as_json: bool) -> fleet_pb2.GroupPolicy:
    """A group's policies; defaults without a group."""
    if not group:
        return fleet_pb2.GroupPolicy()
    with connect(address, as_json=as_json, group=group) as c:
        return c.fleet.GetGroup(fleet_pb2.GetGroupRequest(group=group), timeout=c.timeout).group.policy


def _word(enum: Any, number: int) -> str:
    return "" if not number else str(enum.Name(number)).rpartition("_")[2].lower()


CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="The trainer's weights, as Hugging Face lays them out.")
]
VersionOption = Annotated[int, typer.Option("--version", min=-1, help="Theirs; -1 = whatever the engine has.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Of the trainer: float32, bfloat16 or float16.")]
HeadOption = Annotated[str, typer.Option("--head-dtype", help="Of its last projection.")]
SamplingOption = Annotated[
    list[str] | None, typer.Option("--sampling", help="TEMPERATURE[,top_k=K][,top_p=P]; none = six. Repeatable.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of prompts and sampler.")]
PromptsOption = Annotated[int, typer.Option("--prompts", min=1, help="How many.")]
LengthOption = Annotated[int, typer.Option("--prompt-tokens", min=1, help="Of each.")]
TokensOption = Annotated[int, typer.Option("--tokens", min=1, help="Sampled in each completion.")]
CompletionsOption = Annotated[int, typer.Option("--completions", min=1, help="Of each prompt and sampling.")]
BoundOption = Annotated[list[str] | None, typer.Option("--bound", help="name=value: another bound. Repeatable.")]


@app.command()
def check(
    url: UrlOption = DEFAULT_URL,
    checkpoint: CheckpointOption = None,
    scorer: Annotated[
        str, typer.Option("--scorer", help="module:function that scores in place of --checkpoint (docs/parity.md).")
    ] = "",
    version: VersionOption = -1,
    dtype: DtypeOption = "float32",
    head_dtype: HeadOption = "float32",
    sampling: SamplingOption = None,
    seed: SeedOption = 0,
    prompts: PromptsOption = 4,
    prompt_tokens: LengthOption = 256,
    tokens: TokensOption = 32,
    completions: CompletionsOption = 2,
    vocab: Annotated[int, typer.Option("--vocab", min=0, help="Token ids are below it; 0 = the checkpoint's.")] = 0,
    bound: BoundOption = None,
    report: Annotated[Path, typer.Option("--report", help="Folder of parity.json and parity.png.")] = _REPORT,
    as_json: JsonOption = False,
) -> None:
    """Compare the engine's and the trainer's log-probabilities of the same tokens. Exit 4 if they are too far apart,
    3 if no engine answers."""
    given = locals()
    from weightplane.parity.running import prepare

    found = _ran(lambda: prepare(_asked(given)).run(report), as_json)
    if as_json:
        emit_json(found)
    else:
        _show(found, report)
    if not found["ok"]:
        raise typer.Exit(Exit.REFUSED)


@app.command()
def diagnose(
    url: UrlOption = DEFAULT_URL,
    checkpoint: CheckpointOption = None,
    previous: Annotated[
        Path | None, typer.Option("--previous", help="The version before: stale weights and caches are told by it.")
    ] = None,
    in_flight: Annotated[
        float,
        typer.Option(
            "--in-flight", min=0, help="Seconds to keep requests in flight until an update meets one; 0 = none."
        ),
    ] = 0,
    fresh: Annotated[str, typer.Option("--fresh", help="URL of an engine freshly started from --checkpoint.")] = "",
    scorer: Annotated[
        str, typer.Option("--scorer", help="module:function: what the training job itself computes, judged too.")
    ] = "",
    cache: Annotated[str, typer.Option("--cache", help="Cache policy declared: stale keys are a fault if clear.")] = (
        "clear"
    ),
    version: VersionOption = -1,
    dtype: DtypeOption = "float32",
    head_dtype: HeadOption = "float32",
    sampling: SamplingOption = None,
    seed: SeedOption = 0,
    prompts: PromptsOption = 4,
    prompt_tokens: LengthOption = 256,
    tokens: TokensOption = 32,
    completions: CompletionsOption = 1,
    bound: BoundOption = None,
    report: Annotated[Path, typer.Option("--report", help="Folder of diagnosis.json.")] = _REPORT,
    as_json: JsonOption = False,
) -> None:
    """Say which kind of mismatch there is, and the likeliest cause, by controlled re-runs. Exit 4 if there is one,
    3 if no engine answers."""
    given = locals()
    from weightplane.parity.running import diagnosed

    one_of("--cache", cache, ("clear", "keep", "salt"))
    found = _ran(lambda: diagnosed(_asked(given), report), as_json)
    if as_json:
        emit_json(found)
    else:
        rows = [
            [c["kind"], c["cause"], "-" if c["mean_abs"] is None else f"{c['mean_abs']:.2e}", str(c["outside"])]
            for c in found["candidates"][:8]
        ]
        if rows:
            table("what each hypothesis leaves of the difference", ["kind", "cause", "mean |Δ|", "outside"], rows)
        for name, stats in found["reruns"].items():
            mean = "not finite" if stats["mean_abs"] is None else f"{stats['mean_abs']:.2e}"
            console.print(f"{_RERUNS.get(name, name)}: mean |Δ| {mean}", markup=False)
        if in_flight:
            console.print(f"{found['in_flight']} request(s) in flight met an update")
        cause = "" if found["cause"] == found["kind"] else f" {found['cause']}:"
        console.print(f"{found['kind']}:{cause} {found['text']}", markup=False)
        if found["advice"]:
            console.print(f"  next: {found['advice']}", markup=False)
    if not found["ok"]:
        raise typer.Exit(Exit.REFUSED)


def _asked(given: Mapping[str, Any]) -> Asked:
    """A command's options by their names as ``Asked`` has them: what it lacks is the command's own."""
    from weightplane.parity.running import Asked

    others = {"sampling": "samplings", "bound": "bounds", "cache": "cache_policy"}
    named = {others.get(name, name): value for name, value in given.items()}
    named["version"] = None if named["version"] < 0 else named["version"]
    wanted = {f.name for f in fields(Asked)}
    return Asked(**{name: value for name, value in named.items() if name in wanted and value is not None})


def _ran(work: Callable[[], dict[str, Any]], as_json: bool) -> dict[str, Any]:
    """What the work found; its errors as documented exits."""
    from weightplane.parity.running import ProbeError, Unfit, Unreachable

    try:
        return work()
    except Unfit as error:
        raise typer.BadParameter(str(error)) from None
    except ModuleNotFoundError as error:
        todo = "pip install 'weightplane[torch]' transformers"
        complain(f"{error.name} is missing", "", Exit.REFUSED, as_json, todo)
    except KeyboardInterrupt:
        interrupted("nothing was measured; what the engine had begun for it runs to its end there", as_json)
    except Unreachable as error:
        complain(str(error), "UNREACHABLE", Exit.UNREACHABLE, as_json, _START)
    except ProbeError as error:
        complain(str(error), "", Exit.REFUSED, as_json, _START if "HTTP 40" in str(error) else "")


def _show(found: dict[str, Any], report: Path) -> None:
    rows = []
    for s in [{"sampling": None, **found["whole"]}, *found["by_sampling"]]:
        of = s["sampling"]
        name = "all" if of is None else f"T {of['temperature']:g}, top-k {of['top_k']}, top-p {of['top_p']:g}"
        figures = [s["mean_abs"], s["p99_abs"], s["max_abs"], s["kl"], s["clip_fraction"]]
        shown = ["-" if v is None else f"{v:.2e}" for v in figures]
        rows.append([name, str(s["tokens"]), *shown, "-" if s["ess"] is None else f"{s['ess']:.6f}"])
        rows[-1] += [str(s["outside"]), str(s["bad"])]
    columns = ["sampling", "tokens", "mean |Δ|", "p99 |Δ|", "max |Δ|", "KL", "clipped", "ESS", "outside", "bad"]
    table(f"parity check of {found['url']} at version {found['version']}", columns, rows)
    for text in found["exceeded"][:8]:
        console.print(f"too far apart: {text}", markup=False)
    console.print("at parity" if found["ok"] else "NOT at parity")
    console.print(f"report: {', '.join(found['files']) or report}")


def register(root: typer.Typer) -> None:
    """Add these commands."""
    root.add_typer(app, name="parity")
