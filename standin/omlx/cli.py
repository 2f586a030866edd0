"""``python -m omlx.cli serve``."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from ._version import __version__

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def serve_command(args: argparse.Namespace) -> None:
    """Start the server; the port is bound before the server module is imported."""
    import uvicorn

    from .settings import init_settings

    print(f"oMLX stand-in, version {__version__}")
    settings = init_settings(base_path=args.base_path, cli_args=args)
    errors = settings.validate()
    if errors:
        for error in errors:
            print(f"Configuration error: {error}")
        sys.exit(1)
    settings.ensure_directories()
    settings.save_cli_overrides(args)
    level = "debug" if settings.server.log_level == "trace" else settings.server.log_level
    logging.basicConfig(level=level.upper(), format=_FORMAT)
    log_file = settings.base_path / "logs" / "server.log"
    handler = logging.FileHandler(log_file)
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().addHandler(handler)

    hosts = [part.strip() for part in settings.server.host.split(",") if part.strip()]
    configs = [
        uvicorn.Config(
            "omlx.server:app",
            host=host,
            port=settings.server.port,
            log_level=level,
            access_log=settings.server.log_level == "trace",
        )
        for host in hosts
    ]
    sockets = [config.bind_socket() for config in configs]
    try:
        from .server import init_server

        init_server(
            model_dirs=[str(folder) for folder in settings.get_effective_model_dirs()],
            scheduler_config=settings.to_scheduler_config(),
            api_key=settings.auth.api_key,
            global_settings=settings,
        )
        print(f"Starting server at http://{hosts[0]}:{settings.server.port}", flush=True)
        try:
            uvicorn.Server(configs[0]).run(sockets=sockets)
        except KeyboardInterrupt:
            pass
    finally:
        for sock in sockets:
            sock.close()


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def create_parser() -> argparse.ArgumentParser:
    """The command line. Options that have no meaning here are taken and ignored."""
    parser = argparse.ArgumentParser(prog="omlx")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    serve = commands.add_parser("serve", help="start the server")
    levels = ["trace", "debug", "info", "warning", "error"]
    options: dict[str, dict[str, Any]] = {
        "--model-dir": {"help": "folders with models, comma-separated"},
        "--base-path": {"help": "folder for settings and logs"},
        "--host": {"help": "addresses to listen on, comma-separated"},
        "--port": {"type": int},
        "--api-key": {},
        "--log-level": {"choices": levels},
        "--memory-guard": {"choices": ["off", "safe", "balanced", "aggressive"]},
        "--memory-guard-gb": {"type": _positive, "help": "ceiling in GB (1024**3 bytes)"},
        "--max-concurrent-requests": {"type": int},
        "--embedding-batch-size": {"type": int},
        "--sse-keepalive-mode": {"choices": ["chunk", "comment", "off"]},
        "--no-cache": {"action": "store_true", "help": "ignored"},
        "--paged-ssd-cache-dir": {"help": "ignored"},
        "--hot-cache-max-size": {"help": "ignored"},
        "--no-hf-cache": {"action": "store_true", "help": "ignored"},
        "--hf-cache": {"action": "store_true", "help": "ignored"},
    }
    for flag, keywords in options.items():
        serve.add_argument(flag, **keywords)
    return parser


def main() -> None:
    parser = create_parser()
    args = parser.parse_args()
    if args.command == "serve":
        serve_command(args)
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
