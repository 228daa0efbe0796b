"""``weightplane inference-agent``: run one replica in this process."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from .client import DEFAULT_ADDRESS, AddressOption, GroupOption, dial
from .exits import Exit
from .launched import AnnounceOption, ExitWithOption, announce, exit_with
from .network import AdvertiseOption, DataOption, InterfaceOption, on_network
from .output import complain, console, err
from .serve import LogJsonOption, LogLevelOption, configure_logging

__all__ = ["register"]


def _pairs(option: str, texts: list[str], parse: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, sep, value = text.partition("=")
        if not sep or not key:
            raise typer.BadParameter(f"{option} {text!r}: expected key=value")
        try:
            found[key] = json.loads(value) if parse else value
        except ValueError:
            found[key] = value
    return found


_FACTORY = (
    "pass --engine module:function, a function of yours that returns the engine (docs/inference.md has one of five "
    "lines); it takes no argument but what --engine-option gives it"
)
_VLLM = (
    "docs/vllm.md says how vLLM is started (VLLM_SERVER_DEV_MODE=1, --weight-transfer-config); --engine-option "
    "url=http://HOST:PORT is its server, without /v1"
)


def inference_agent(
    group: GroupOption,
    replica_id: Annotated[str, typer.Option("--replica-id", help="Stable and unique in the group.")],
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="module:function that returns an engine (also of the current folder), or a registered name whose "
            "arguments are all plain values, such as vllm; torch_module wants a module, so a function.",
        ),
    ],
    address: AddressOption = DEFAULT_ADDRESS,
    option: Annotated[
        list[str] | None, typer.Option("--engine-option", help="key=value for the factory (JSON values). Repeatable.")
    ] = None,
    label: Annotated[list[str] | None, typer.Option("--label", help="key=value for selectors. Repeatable.")] = None,
    transport: Annotated[
        list[str] | None, typer.Option("--transport", help="Offer this transport; none = all that work here.")
    ] = None,
    generate: Annotated[
        str, typer.Option("--generate", help="host:port of the minimal /generate endpoint (port 0: a free one).")
    ] = "",
    retain: Annotated[
        str,
        typer.Option("--retain", help="Keep a copy of each version for replicas that come late: memory, or a folder."),
    ] = "",
    retain_bytes: Annotated[int, typer.Option("--retain-bytes", min=0, help="Bound of that copy; 0 = none.")] = 0,
    data: DataOption = "",
    advertise: AdvertiseOption = "",
    interface: InterfaceOption = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow ports off loopback without TLS. Anyone in reach can use them.")
    ] = False,
    serve_unsynced: Annotated[
        bool, typer.Option("--serve-unsynced", help="Generate before the first update too (experiments' control).")
    ] = False,
    log_level: LogLevelOption = "info",
    log_json: LogJsonOption = False,
    to: AnnounceOption = None,
    parent: ExitWithOption = 0,
) -> None:
    """Make an engine a replica, until SIGTERM or Ctrl-C: it then leaves in good order."""
    configure_logging(log_level, log_json)
    exit_with(parent)
    if insecure:
        os.environ["WEIGHTPLANE_INSECURE"] = "1"  # for every port that a transport opens in this process
    on_network("DATA", data, advertise, interface or ())
    from weightplane.controlplane.ports import PortRefused, check_free
    from weightplane.inference_agent.agent import InferenceAgent
    from weightplane.inference_agent.generate import GenerateServer
    from weightplane.inference_agent.serve import EngineFailed, run_agent
    from weightplane.transports.retained import Retainer

    sys.path.insert(0, os.getcwd())  # a factory beside the user is found, as by python itself
    host, _, port = generate.rpartition(":")
    if generate and not (host and port.isdigit()):
        raise typer.BadParameter(f"--generate {generate!r}: expected host:port")

    def ready(agent: InferenceAgent, server: GenerateServer | None) -> None:
        announce(to, replica_id=replica_id, generate=server.address if server is not None else "")
        where = f", generates at http://{server.address}/generate" if server is not None else ""
        console.print(f"replica {replica_id} of group {group} dials {address}{where}; stop it with Ctrl-C")

    try:
        if generate:
            check_free(generate)  # before an engine is loaded for minutes
        status = run_agent(
            engine,
            dial(address),
            group,
            replica_id,
            engine_options=_pairs("--engine-option", option or [], parse=True),
            labels=_pairs("--label", label or [], parse=False),
            transports=transport or None,
            generate_host=host.strip("[]") or "127.0.0.1",
            generate_port=int(port) if generate else None,
            serve_unsynced=serve_unsynced,
            insecure_generate=os.environ.get("WEIGHTPLANE_INSECURE", "") == "1",
            retain=Retainer(retain, retain_bytes) if retain else None,
            on_ready=ready,
        )
    except EngineFailed as error:
        frames = error.frames if engine != "vllm" else ""  # those of our own code: nobody's factory is at fault
        todo = _VLLM if engine == "vllm" else _FACTORY
        complain(f"{error}{chr(10) if frames else ''}{frames}", "", Exit.USAGE, False, todo)
    except PortRefused as error:
        complain(str(error), "", Exit.REFUSED, False, "stop the other, or name another address (port 0: a free one)")
    except (ValueError, OSError) as error:
        complain(str(error), "", Exit.USAGE, False, "weightplane inference-agent --help")
    if status:
        err.print(f"another agent took the name {replica_id!r} over; this one ends", markup=False)
        raise typer.Exit(Exit.REFUSED)


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(name="inference-agent")(inference_agent)
