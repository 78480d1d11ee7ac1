"""The command line: plan, compact, diag, retrieve. Options in, exit code out; the work is done in pipeline."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_group

from haocompact import __version__
from haocompact.errors import DamagedArchive, HaoError, NothingToCompact, TranscriptError, UsageError
from haocompact.stages import heard, stage

if TYPE_CHECKING:
    from haocompact.batch import Choice
    from haocompact.compaction import CompactionSettings, Estimator
    from haocompact.files import Source
    from haocompact.pipeline import Done, Planned, Request
    from haocompact.summarize import Summarizer

app = typer.Typer(
    name="haocompact",
    help="Compact coding-agent transcripts: a summary replaces the old part, the recent part stays byte for byte, "
    "the original stays retrievable.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
SETTINGS_FILE = "HAOCOMPACT_CONFIG"


class Lang(StrEnum):
    en = "en"
    zh = "zh"


class Compat(StrEnum):
    repaired = "repaired"
    seed = "seed"


class OnFailure(StrEnum):
    degrade = "degrade"
    fail = "fail"


class Strategy(StrEnum):
    keep_recent = "keep-recent"
    segment = "segment"


class Target(StrEnum):
    openai = "openai"


class SummarizerName(StrEnum):
    extract = "extract"
    openai = "openai"
    command = "command"
    excerpt = "excerpt"


# ------------------------------------------------------------------------------------ completion
def _formats(incomplete: str) -> list[str]:
    from haocompact.formats import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]


def _estimators(incomplete: str) -> list[str]:
    names = ("cjk", "chars", "tiktoken", "tiktoken:o200k_base", "tiktoken:cl100k_base")
    return [name for name in names if name.startswith(incomplete)]


def _hashes(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Hashes in the archives, newest first, each with its transcript; of a named transcript those that it has."""
    from haocompact.archive import Archive

    named = ctx.params.get("archive") or os.environ.get("HAOCOMPACT_ARCHIVE") or _archive_path()
    paths = [Path(p) for p in (named if isinstance(named, (list, tuple)) else [named])]
    transcript = Path(ctx.params.get("path") or "-")
    text = transcript.read_bytes() if transcript.is_file() else None
    found: list[tuple[str, str]] = []
    for path in (db for p in paths for db in (sorted(p.glob("*.db")) if p.is_dir() else [p])):
        with suppress(HaoError), Archive.open(path) as archive:
            found += [(s.hash, s.source) for s in archive.segments() if s.hash.startswith(incomplete)
                      and (text is None or s.hash.encode() in text)]  # fmt: skip
    return found[::-1][:50]


def _path_or_hash(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Hashes, where a few digits of one are typed; the shell itself completes file names."""
    return _hashes(ctx, incomplete) if _HASH_BEGINS.fullmatch(incomplete) else []


_HASH_BEGINS = re.compile("[0-9a-f]{2,16}")


# --------------------------------------------------------------------------------- shared options
Paths = Annotated[
    list[str] | None, typer.Argument(help="Files, folders, or - for stdin (the default).", show_default=False)
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        autocompletion=_formats,
        help="Name the format instead of detecting it.",
        show_default=False,
    ),
]
Leaf = Annotated[
    str | None,
    typer.Option(help="Id of the branch end to read, where a session has several.", show_default=False),
]
Branch = Annotated[
    int | None,
    typer.Option(min=1, help="Number of the branch end to read, as plan lists them.", show_default=False),
]
KeepRecent = Annotated[
    int,
    typer.Option(
        "--keep-recent", min=0, envvar="HAOCOMPACT_KEEP_RECENT", help="Tokens of recent context that stay."
    ),
]
Reserve = Annotated[
    int, typer.Option(min=0, envvar="HAOCOMPACT_RESERVE", help="Tokens reserved for prompt and answer.")
]
Window = Annotated[
    int, typer.Option(min=0, envvar="HAOCOMPACT_WINDOW", help="Context window of the model, in tokens.")
]
EstimatorName = Annotated[
    str,
    typer.Option(
        "--estimator",
        autocompletion=_estimators,
        envvar="HAOCOMPACT_ESTIMATOR",
        help="cjk, chars, or tiktoken[:ENCODING].",
    ),
]
StrategyOption = Annotated[Strategy, typer.Option("--strategy", help="How the removed part is chosen.")]
TailKeep = Annotated[
    int, typer.Option("--tail-keep", min=1, help="Messages that --strategy segment protects at the end.")
]
CompatOption = Annotated[
    Compat,
    typer.Option("--compat", help="seed: follow the original system to the letter, its faults included."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a transcript, a line each.")]
Check = Annotated[bool, typer.Option("--check", help="Exit 3 when nothing would be compacted.")]
ArchiveOption = Annotated[
    Path | None,
    typer.Option(
        "--archive",
        envvar="HAOCOMPACT_ARCHIVE",
        help="Where removed lines are kept.",
        show_default="user data folder",
    ),
]
Archives = Annotated[
    list[Path] | None,
    typer.Option(
        "--archive",
        envvar="HAOCOMPACT_ARCHIVE",
        help="An archive, or a folder of them (*.db); several are read as one.",
        show_default="user data folder",
    ),
]
LogOption = Annotated[
    Path | None,
    typer.Option(
        "--log",
        envvar="HAOCOMPACT_LOG",
        help="The log of skipped compactions.",
        show_default="user log folder",
    ),
]
LangOption = Annotated[
    Lang, typer.Option("--lang", envvar="HAOCOMPACT_LANG", help="Language of haocompact's own sentences.")
]


def _seconds(text: str) -> float:
    """90, 90s, 15m, 12h, 30d or 4w, in seconds."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e12:
        raise typer.BadParameter(f"{text!r} is no duration (90s, 15m, 12h, 30d, 4w)")
    return seconds


Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Every warning and detail; what was done, and how long it took."),
]
Cooldown = Annotated[
    float, typer.Option(min=0, help="With --if-needed: seconds since this transcript's last compaction.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors on stderr.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"haocompact {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.default_map = _settings_file()


@app.command()
def plan(
    context: typer.Context,
    paths: Paths = None,
    keep_recent: KeepRecent = 20000,
    reserve: Reserve = 16384,
    window: Window = 200_000,
    estimator: EstimatorName = "cjk",
    format: FormatOption = None,
    leaf: Leaf = None,
    branch: Branch = None,
    strategy: StrategyOption = Strategy.keep_recent,
    tail_keep: TailKeep = 6,
    compat: CompatOption = Compat.repaired,
    turns: Annotated[bool, typer.Option("--turns", help="One row a turn instead of a message.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All rows; long sessions are folded otherwise.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Draw the context into this file.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="The same picture as a page.", show_default=False)
    ] = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Each setting, its value, and where that comes from.")
    ] = False,
    as_json: AsJson = False,
    check: Check = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show where a transcript would be cut.

    \b
    haocompact plan session.jsonl --keep-recent 5000
    haocompact plan --turns --svg context.svg session.jsonl
    haocompact plan --json ~/sessions | jq -r 'select(.result == "ok") | .path'
    """
    from haocompact import show

    if show_settings:
        return _show_settings(context, as_json)
    context.with_resource(_telling(context, paths, quiet, verbose))
    settings = _settings(keep_recent, reserve, window, estimator, compat, strategy, tail_keep)
    found: list[bool] = []

    def one(source: Source, request: Request) -> None:
        planned = _plan(source, request, quiet, verbose)
        found.append(_compactable(planned))
        _draw(planned, svg, html, first=len(found) == 1)
        if as_json:
            print(show.dumps(show.plan_json(planned)))
        else:
            print(("\n" if len(found) > 1 else "") + show.title(planned))
            _print(show.plan_table(planned, turns=turns, everything=everything))
            print("\n".join(show.plan_figures(planned)))

    _each(paths, _request(settings, format, leaf, branch=branch), one, as_json)
    if check and not any(found):
        raise NothingToCompact("nothing to compact")


def _draw(planned: Planned, svg: Path | None, html: Path | None, first: bool) -> None:
    if svg is None and html is None:
        return
    from haocompact import draw, files

    if not first:
        raise UsageError("--svg and --html draw one transcript")
    for path, picture in ((svg, draw.svg), (html, draw.html)):
        if path is not None:
            files.write_file(path, picture(planned).encode("utf-8", "replace"))


def _show_settings(context: typer.Context, as_json: bool) -> None:
    """The settings of all commands: value and source, as they are for this command line."""
    from haocompact import show

    root: Any = context.parent
    params = {p.opts[0]: (command, p) for command in _commands().values() for p in command.params}
    params |= {p.opts[0]: (context.command, p) for p in context.command.params}
    found = [setting for name, (command, param) in params.items() if name.startswith("--")
             and (setting := _setting(context, root.default_map or {}, command, param)) is not None]  # fmt: skip
    print(show.dumps(show.settings_json(found, _settings_path())) if as_json
          else "\n".join(show.settings_text(found, _settings_path())))  # fmt: skip


def _setting(
    context: typer.Context, file: dict[str, Any], command: Any, param: Any
) -> tuple[str, Any, str, str] | None:
    """(option, value, source, variable); None for what is no setting: a switch that is off, a file not named."""
    name, variable = param.opts[0], param.envvar or ""
    usual = {"archive": _archive_path, "log": _log_path}.get(param.name)
    if command is context.command:
        value, source = context.params.get(param.name), _source_of(context, param.name)
    elif variable and os.environ.get(variable):
        value, source = os.environ[variable], "environment"
    elif param.name in file.get(command.name, {}):
        value, source = file[command.name][param.name], "settings file"
    else:
        value, source = param.default, "default"
    value = usual() if value is None and usual else getattr(value, "value", value)
    if param.name in ("show_settings", "as_json") or (
        source == "default" and (value is None or param.is_flag)
    ):
        return None
    return name, value, source, variable if source == "environment" else ""


@app.command()
def compact(
    context: typer.Context,
    paths: Paths = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", help="Write each result into this folder.", show_default=False),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace each transcript; folders are walked.")
    ] = False,
    append: Annotated[
        bool,
        typer.Option("--append", help="Keep all old bytes and add the client's own compaction record."),
    ] = False,
    to: Annotated[
        Target | None,
        typer.Option("--to", help="Write another format than the transcript's own.", show_default=False),
    ] = None,
    keep_recent: KeepRecent = 20000,
    reserve: Reserve = 16384,
    window: Window = 200_000,
    estimator: EstimatorName = "cjk",
    format: FormatOption = None,
    leaf: Leaf = None,
    branch: Branch = None,
    strategy: StrategyOption = Strategy.keep_recent,
    tail_keep: TailKeep = 6,
    compat: CompatOption = Compat.repaired,
    if_needed: Annotated[
        bool, typer.Option("--if-needed", help="Only when the context is past window - reserve.")
    ] = False,
    cooldown: Cooldown = 0,
    range_: Annotated[
        str | None,
        typer.Option(
            "--range",
            help="FIRST..LAST line inside the planned range (--strategy segment).",
            show_default=False,
        ),
    ] = None,
    summarizer: Annotated[
        SummarizerName | None,
        typer.Option(
            envvar="HAOCOMPACT_SUMMARIZER",
            help="extract (the default: offline), openai, command, or "
            "excerpt. --model and --command name theirs themselves.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="HAOCOMPACT_MODEL", help="The model that writes the summary.", show_default=False
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            envvar="HAOCOMPACT_BASE_URL",
            help="An OpenAI-compatible server, e.g. http://localhost:8080/v1.",
            show_default="OPENAI_BASE_URL, else OpenAI's",
        ),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(envvar="HAOCOMPACT_API_KEY_ENV", help="The environment variable that has the key.")
    ] = "OPENAI_API_KEY",
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=2, envvar="HAOCOMPACT_TEMPERATURE", help="Of the model.", show_default="the server's"
        ),
    ] = None,
    retries: Annotated[
        int,
        typer.Option(
            min=0, envvar="HAOCOMPACT_RETRIES", help="Of a request that the server could not serve."
        ),
    ] = 3,
    concurrency: Annotated[
        int, typer.Option(min=1, envvar="HAOCOMPACT_CONCURRENCY", help="Requests to the server at once.")
    ] = 4,
    command: Annotated[
        str | None,
        typer.Option(
            help="A program that gets the prompt on stdin and prints the summary.", show_default=False
        ),
    ] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Run --command in a shell.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, envvar="HAOCOMPACT_TIMEOUT", help="Seconds that a request or the command may take."
        ),
    ] = 600.0,
    summarizer_window: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HAOCOMPACT_SUMMARIZER_WINDOW",
            help="Context window of the summarizing model, in tokens; what is longer goes in chunks. "
            "0: not known.",
        ),
    ] = 0,
    summarizer_max_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="HAOCOMPACT_SUMMARIZER_MAX_TOKENS",
            help="Output limit of the summarizing model; 0 is none.",
        ),
    ] = 0,
    instructions: Annotated[
        str | None,
        typer.Option(help="What the summary should focus on (openai, command).", show_default=False),
    ] = None,
    redact: Annotated[
        bool | None,
        typer.Option(
            "--redact/--no-redact",
            envvar="HAOCOMPACT_REDACT",
            help="Mask secrets in what is sent.",
            show_default="on for openai",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask again, even what the archive has an answer to.")
    ] = False,
    price_in: Annotated[
        float | None,
        typer.Option(
            min=0, envvar="HAOCOMPACT_PRICE_IN", help="Price of a million tokens sent.", show_default=False
        ),
    ] = None,
    price_out: Annotated[
        float | None,
        typer.Option(
            min=0,
            envvar="HAOCOMPACT_PRICE_OUT",
            help="Price of a million tokens received.",
            show_default=False,
        ),
    ] = None,
    summary_chars: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Characters of the offline summary.",
            show_default="a fifth of the old part, 2000 to 12000",
        ),
    ] = None,
    keep_rules: Annotated[
        bool,
        typer.Option(
            "--keep-rules/--no-keep-rules",
            help="Put back the rules that a summary by --command or a model lacks.",
        ),
    ] = True,
    on_failure: Annotated[
        OnFailure, typer.Option(help="When a summary fails: keep an excerpt and say so, or fail (exit 5).")
    ] = OnFailure.degrade,
    allow_growth: Annotated[
        bool, typer.Option("--allow-growth", help="Write a result even when it is larger.")
    ] = False,
    archive: ArchiveOption = None,
    no_archive: Annotated[
        bool, typer.Option("--no-archive", help="Archive nothing and write no marker: you keep the original.")
    ] = False,
    log: LogOption = None,
    lang: LangOption = Lang.en,
    level: Annotated[int, typer.Option(min=1, max=22, help="zstd level of what the archive takes.")] = 6,
    jobs: Annotated[int, typer.Option(min=1, help="Processes for --in-place on many files.")] = 1,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="With --in-place: a Dask scheduler to run on.", show_default=False
        ),
    ] = None,
    min_age: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="DURATION",
            help="Leave files alone that changed this lately (90s, 15m, 12h).",
            show_default="2m in folders",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="DURATION",
            help="With --in-place: only files that were last changed so long ago (30d, 4w).",
            show_default=False,
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="In folders: only files of this name or path.", show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="In folders: no file of this name or path.", show_default=False),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do everything but write; a model or program is not asked.")
    ] = False,
    show_prompt: Annotated[
        bool, typer.Option("--show-prompt", help="As --dry-run, and print the prompts in full.")
    ] = False,
    as_json: AsJson = False,
    check: Check = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Replace the old part by a summary; a skip passes the input through unchanged.

    \b
    haocompact compact session.jsonl -o small.jsonl
    haocompact compact --in-place ~/sessions --jobs 4 --older-than 30d
    """
    settings = _settings(keep_recent, reserve, window, estimator, compat, strategy, tail_keep)
    where_to = None if no_archive else archive or _archive_path()
    asked = _Asked(summarizer, model, base_url, api_key_env, temperature, retries, concurrency, command, shell, timeout,
                   summarizer_window, summarizer_max_tokens, instructions, redact, fresh, lang.value, where_to,
                   _typed(context), quiet, summary_chars)  # fmt: skip
    chosen = _summarizer(asked)
    dry_run = dry_run or show_prompt
    request = _request(settings, format, leaf, branch=branch, summarizer=chosen, lang=lang.value,
                       on_failure=on_failure.value, keep_rules=keep_rules, archive=where_to, log=log or _log_path(),
                       prices=_prices(price_in, price_out),
                       if_needed=if_needed, cooldown=cooldown, lines=_line_range(range_, strategy),
                       allow_growth=allow_growth, append=append, level=level, to=to or "")  # fmt: skip
    if to and (in_place or append):
        raise UsageError("--to writes another file beside the transcript: it does not go with "
                         f"{'--in-place' if in_place else '--append'}")  # fmt: skip
    where = _one_target(output, output_dir, in_place, dry_run)
    verbose = verbose and not quiet
    context.with_resource(_telling(context, paths, quiet, verbose))
    if where == "stdout" and as_json and not dry_run:
        raise UsageError(
            "--json goes with -o, --output-dir, --in-place or --dry-run: stdout carries the transcript"
        )
    if in_place:
        from haocompact.batch import Choice

        choice = Choice(min_age, older_than or 0, tuple(include or ()), tuple(exclude or ()))
        return _in_place(
            paths, request, choice, jobs, dask, as_json, quiet, verbose, check, dry_run, show_prompt
        )
    done = _to_targets(paths, request, where, output, output_dir, dry_run)
    _finish(list(_told(done, request, as_json, quiet, verbose, show_prompt)), check)


class DiagCommand(TyperCommand):
    """`--log` may stand without a value: it then reads the log at its usual place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args[1:], ""]
        bare = [word == "--log" and (not after or (after != "-" and after.startswith("-")))
                for word, after in zip(args, following, strict=False)]  # fmt: skip
        words = ["--read-log" if is_bare else word for word, is_bare in zip(args, bare, strict=True)]
        return super().parse_args(ctx, words)


@app.command(cls=DiagCommand)
def diag(
    context: typer.Context,
    paths: Paths = None,
    keep_recent: KeepRecent = 20000,
    reserve: Reserve = 16384,
    window: Window = 200_000,
    estimator: EstimatorName = "cjk",
    format: FormatOption = None,
    leaf: Leaf = None,
    branch: Branch = None,
    strategy: StrategyOption = Strategy.keep_recent,
    tail_keep: TailKeep = 6,
    compat: CompatOption = Compat.repaired,
    if_needed: Annotated[
        bool, typer.Option("--if-needed", help="Take the trigger and --cooldown into account.")
    ] = False,
    cooldown: Cooldown = 0,
    archive: ArchiveOption = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="[FILE]",
            envvar="HAOCOMPACT_LOG",
            help="Read the log of skips back, by cause (no FILE: the usual one). With PATHS: where to write.",
            show_default="user log folder",
        ),
    ] = None,
    read_log: Annotated[bool, typer.Option("--read-log", hidden=True, help="--log without FILE.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="WHEN",
            help="With --log: only skips since then: 30m, 2h, 7d, or 2026-05-11T06:30.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --log: then show each skip as it is written.")
    ] = False,
    as_json: AsJson = False,
    check: Check = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say why a compaction is skipped, and what would change that.

    \b
    haocompact diag session.jsonl
    haocompact diag --keep-recent 5000 --json session.jsonl | jq -r .suggestions[]
    haocompact diag --log --since 7d
    """
    from haocompact import pipeline

    if read_log or (not paths and _source_of(context, "log") == "option"):
        return _show_log(log or _log_path(), since, follow, as_json)
    if since or follow:
        raise UsageError("--since and --follow go with --log")
    context.with_resource(_telling(context, paths, quiet, verbose))
    settings = _settings(keep_recent, reserve, window, estimator, compat, strategy, tail_keep)
    request = _request(settings, format, leaf, branch=branch, log=log or _log_path(), if_needed=if_needed,
                       cooldown=cooldown, archive=archive or _archive_path())  # fmt: skip
    found: list[bool] = []

    def one(source: Source, request: Request) -> None:
        found.append(_diagnosed(source, request, as_json, quiet, verbose))

    _each(paths, request, one, as_json, pipeline.explain_error)
    if check and not any(found):
        raise NothingToCompact("nothing to compact")


def _diagnosed(source: Source, request: Request, as_json: bool, quiet: bool, verbose: bool) -> bool:
    """Show one diagnosis, log the skip; whether it would be compacted."""
    from haocompact import pipeline, show
    from haocompact.compaction import NoCompaction
    from haocompact.diag import compaction_line

    planned = _plan(source, request, quiet, verbose)
    if request.if_needed and _compactable(planned):
        planned = pipeline.as_needed(planned, request)
    planned = pipeline.as_compacted(planned)
    with stage("explain"):
        found = pipeline.explain(planned)
    if isinstance(planned.outcome, NoCompaction):
        _note(compaction_line(planned.outcome), quiet)
        _note(pipeline.record_skip(planned.outcome, source.path, request), quiet)
    print(show.dumps(show.diag_json(planned, found)) if as_json
          else "\n".join(show.diag_text(planned, found, verbose=verbose)))  # fmt: skip
    return _compactable(planned)


@app.command()
def retrieve(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            autocompletion=_path_or_hash, help="A compacted transcript, - for stdin, or a hash alone."
        ),
    ] = "-",
    hash: Annotated[
        str | None,
        typer.Argument(
            autocompletion=_hashes,
            help="The 16 digits of a marker; without, the segments are listed.",
            show_default=False,
        ),
    ] = None,
    from_message: Annotated[int, typer.Option(min=0, help="First message of the window (0-based).")] = 0,
    budget: Annotated[
        int, typer.Option(min=1, help="Characters of a window; at least one message is shown.")
    ] = 56 * 1024,
    raw: Annotated[bool, typer.Option("--raw", help="The original lines instead.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="The whole original, byte for byte.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="The summary that stands in the transcript.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Re-hash everything in the archive.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="What the archive holds, and its size.")] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", help="Write every original into this folder.", show_default=False),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="List what no transcript needs any more (those in a folder PATH count, too).",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: remove what is listed.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="DURATION",
            help="With --prune: leave what was archived later than this.",
            show_default="1d",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file.", show_default=False)
    ] = None,
    format: FormatOption = None,
    archive: Archives = None,
    lang: LangOption = Lang.en,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Bring archived originals back: list them, show one in windows, restore the file.

    \b
    haocompact retrieve small.jsonl
    haocompact retrieve small.jsonl --restore -o session.jsonl
    """
    from haocompact import files, pipeline, show

    request = _request(
        _settings(), format, None, archives=tuple(archive or [_archive_path()]), lang=lang.value
    )
    context.with_resource(_telling(context, [path], quiet, verbose))
    if verify:
        return _verify(request, as_json)
    if stats:
        return _stats(request, as_json)
    if export is not None:
        return _export(request, export, as_json)
    if prune or yes:
        if not prune:
            raise UsageError("--yes goes with --prune")
        folders = [] if path == "-" else [path]
        return _prune(request, folders, 86400 if older_than is None else older_than, yes, as_json)
    if hash is None and _looks_like_hash(path):
        path, hash = "", path
    if hash is not None:
        if restore:
            _send(pipeline.restore_input(hash, request, path), output)
        elif raw:
            _send(pipeline.raw_segment(hash, request, path), output)
        else:
            with stage("look up"):
                text = pipeline.window_text(hash, request, from_message, budget, path)
            print(show.dumps({"version": 1, "hash": hash, "text": text}) if as_json else show.printable(text))
        return
    with files.open_source(path, sys.stdin.buffer) as source:
        if restore:
            _send(pipeline.restore(source, request), output)
        elif summary:
            print(show.printable(pipeline.summary_of(source, request)))
        elif as_json:
            print(show.dumps(show.directory_json(pipeline.directory(source, request))))
        else:
            found = pipeline.directory(source, request)
            if found.segments or found.missing:
                _print(show.directory_table(found))
            else:
                print(f"nothing is archived for {show.place(path)}")


# --------------------------------------------------------------------------------------- helpers
def _settings(keep_recent: int = 20000, reserve: int = 16384, window: int = 200_000, estimator: str = "cjk",
              compat: Compat = Compat.repaired, strategy: Strategy = Strategy.keep_recent,
              tail_keep: int = 6) -> CompactionSettings:  # fmt: skip
    from haocompact.compaction import CompactionSettings

    return CompactionSettings(keep_recent_tokens=keep_recent, reserve_tokens=reserve, context_window=window,
                              estimator=_estimator(estimator), repair=compat is Compat.repaired,
                              strategy=strategy.value, tail_keep=tail_keep)  # fmt: skip


_SOURCES = {"COMMANDLINE": "option", "ENVIRONMENT": "environment", "DEFAULT_MAP": "settings file"}


def _source_of(context: typer.Context, name: str) -> str:
    """Where the value of a setting comes from: option, environment, settings file or default."""
    source = context.get_parameter_source(name)
    return _SOURCES.get(source.name if source else "", "default")


def _line_range(text: str | None, strategy: Strategy) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dots, last = text.partition("..")
    if strategy is not Strategy.segment or not (dots and first.isdigit() and last.isdigit()):
        raise UsageError("--range is FIRST..LAST and goes with --strategy segment")
    return int(first), int(last)


def _estimator(name: str) -> Estimator:
    from haocompact.compaction import ESTIMATORS, tiktoken_estimator

    if name in ESTIMATORS:
        return ESTIMATORS[name]
    kind, _, encoding = name.partition(":")
    if kind != "tiktoken":
        raise UsageError(f"no such estimator: {name} (known: {', '.join(ESTIMATORS)}, tiktoken[:ENCODING])")
    return tiktoken_estimator(encoding or "o200k_base")


def _request(settings: CompactionSettings, format: str | None, leaf: str | None, **more: Any) -> Request:
    from haocompact.formats import FORMATS
    from haocompact.pipeline import Request

    if format is not None and format not in FORMATS:
        raise UsageError(f"no such format: {format} (known: {', '.join(FORMATS)})")
    if leaf is not None and more.get("branch") is not None:
        raise UsageError("--leaf and --branch contradict each other")
    return Request(settings=settings, format=format, leaf=leaf, **more)


class _Asked(NamedTuple):
    """The options of the summarizers; `typed` are those that stand on the command line itself."""

    name: SummarizerName | None
    model: str | None
    base_url: str | None
    key_variable: str
    temperature: float | None
    retries: int
    concurrency: int
    command: str | None
    shell: bool
    timeout: float
    window: int
    max_tokens: int
    focus: str | None
    redact: bool | None
    fresh: bool
    lang: str
    archive: Path | None
    typed: frozenset[str]
    quiet: bool
    summary_chars: int | None


def _typed(context: typer.Context) -> frozenset[str]:
    """Options that were given on the command line, not by the environment or the settings file."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(
        name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    )


def _summarizer(asked: _Asked) -> Summarizer:
    from haocompact.summarize import Excerpt, Extract

    chosen = _chosen(asked)
    if asked.summary_chars is not None and chosen is not SummarizerName.extract:
        raise UsageError("--summary-chars goes with the offline summarizer")
    match chosen:
        case SummarizerName.openai:
            return _of_model(asked)
        case SummarizerName.command:
            return _of_command(asked)
        case SummarizerName.excerpt:
            return Excerpt(asked.lang)
        case _:
            return Extract(asked.summary_chars)


def _chosen(asked: _Asked) -> SummarizerName:
    """The one summarizer that is named. A model in the environment or the settings file sends nothing by itself."""
    kinds = {
        "command": SummarizerName.command,
        "model": SummarizerName.openai,
        "base_url": SummarizerName.openai,
    }
    named = {f"--{option.replace('_', '-')}": kind for option, kind in kinds.items() if option in asked.typed}
    if asked.name is not None and "summarizer" in asked.typed:
        named[f"--summarizer {asked.name.value}"] = asked.name
    if len(set(named.values())) > 1:
        raise UsageError(
            f"{' and '.join(named)}: only one summarizer can be named", code="COMPACTION_SUMMARIZER_TAKEN"
        )
    set_up = asked.name or (SummarizerName.command if asked.command is not None else SummarizerName.extract)
    return next(iter(named.values()), set_up)


def _of_model(asked: _Asked) -> Summarizer:
    from haocompact.model import OpenAI
    from haocompact.summarize import Prompted

    if not asked.model:
        raise UsageError("--summarizer openai needs --model")
    keyless = asked.base_url or os.environ.get("OPENAI_BASE_URL")
    if not os.environ.get(asked.key_variable, "").strip() and (not keyless or "api_key_env" in asked.typed):
        raise UsageError(f"no key: {asked.key_variable} is not set (--api-key-env names another variable)")
    model = OpenAI(asked.model, asked.base_url, asked.key_variable, asked.temperature, asked.timeout, asked.retries,
                   asked.concurrency)  # fmt: skip
    return Prompted("openai", model, redact=asked.redact is not False, side_by_side=True,
                    asked=model.place,
                    **_prompting(asked, model.identity))  # fmt: skip


def _of_command(asked: _Asked) -> Summarizer:
    from haocompact.redact import mask_error
    from haocompact.summarize import Command, Prompted

    if asked.command is None:
        raise UsageError("--summarizer command needs --command")
    command = Command(asked.command, asked.timeout, asked.shell)
    return Prompted("command", command, redact=bool(asked.redact), asked=mask_error(asked.command),
                    **_prompting(asked, f"command {asked.shell} {asked.command}"))  # fmt: skip


def _prompting(asked: _Asked, identity: str) -> dict[str, Any]:
    from haocompact.chunks import Answers

    return {"model_max_tokens": asked.max_tokens, "focus": asked.focus, "lang": asked.lang, "window": asked.window,
            "answers": Answers(asked.archive, identity, asked.fresh) if asked.archive else None,
            "progress": _note if sys.stderr.isatty() and not asked.quiet else None}  # fmt: skip


def _prices(sent: float | None, received: float | None) -> tuple[float, float] | None:
    return None if sent is None and received is None else (sent or 0.0, received or 0.0)


def _data_folder(kind: str) -> Path:
    import platformdirs

    folders = platformdirs.PlatformDirs("haocompact", appauthor=False)
    return Path(
        {"data": folders.user_data_dir, "log": folders.user_log_dir}.get(kind, folders.user_config_dir)
    )


def _archive_path() -> Path:
    return _data_folder("data") / "archive.db"


def _log_path() -> Path:
    return _data_folder("log") / "compaction_diag.log"


def _settings_path() -> Path:
    return Path(os.environ.get(SETTINGS_FILE) or _data_folder("config") / "config.toml")


def _settings_file() -> dict[str, Any]:
    """Defaults from the settings file: long option names as keys, for every command that has them."""
    import tomllib

    named, path = os.environ.get(SETTINGS_FILE), _settings_path()
    try:
        table: Any = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        if named is None and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            return {}
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    for key in ("tool", "haocompact") if "tool" in table else ():
        table = table.get(key, {})
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {key} is not a table")
    commands = {name: _option_names(command) for name, command in _commands().items()}
    known = sorted({key for names in commands.values() for key in names})
    for key in table:
        if key not in known:
            raise UsageError(f"{path}: unknown key {key!r}{_nearest(key, known)}")
        if isinstance(table[key], dict) or (isinstance(table[key], list) and f"--{key}" not in REPEATED):
            raise UsageError(f"{path}: Invalid value for '--{key}': {table[key]!r}")
    return {name: {names[k].name: _listed(v, names[k]) for k, v in table.items() if k in names}
            for name, names in commands.items()}  # fmt: skip


def _listed(value: Any, option: Any) -> Any:
    """A single value of an option that may be repeated is a list of one."""
    return [value] if option.multiple and not isinstance(value, list) else value


def _option_names(command: Any) -> dict[str, Any]:
    return {opt[2:]: p for p in command.params for opt in p.opts if opt.startswith("--")}


def _nearest(key: str, known: list[str]) -> str:
    import difflib

    found = difflib.get_close_matches(key, known, 1, 0)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _plan(source: Source, request: Request, quiet: bool, verbose: bool = False) -> Planned:
    from haocompact import pipeline, show

    with stage("read and plan"):
        planned = pipeline.plan(source, request)
    _note(show.format_line(planned.path, planned.session.format, request.format), quiet or not verbose)
    for line in pipeline.warnings_of(planned, everything=verbose):
        _note(f"warning: {show.place(line)}", quiet)
    return planned


def _compactable(planned: Planned) -> bool:
    from haocompact.compaction import NoCompaction

    return not isinstance(planned.outcome, NoCompaction)


def _found(paths: list[str]) -> list[tuple[str, bool]]:
    from haocompact import files

    found = list(files.transcripts_under(paths))
    if not found:
        raise TranscriptError("no transcript in it (*.jsonl, *.jsonl.gz, *.jsonl.zst)", path=", ".join(paths))
    return found


Why = Callable[[HaoError, "Source | None"], tuple[str, str, str]]


def _each(paths: list[str] | None, request: Request, one: Callable[[Source, Request], None], as_json: bool,
          why: Why | None = None) -> None:  # fmt: skip
    """Run `one` over all transcripts; an unreadable one is reported (with `why`) and does not stop the others."""
    found = [path for path, _ in _found(paths or ["-"])]
    failed: HaoError | None = None
    with _progress(len(found), as_json, quiet=len(found) < 10 or sys.stdout.isatty()) as advance:
        for path in found:
            error = _attempt(path, request, one, as_json, why)
            failed = failed or error
            advance()
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def _attempt(path: str, request: Request, one: Callable[[Source, Request], None], as_json: bool,
             why: Why | None) -> HaoError | None:  # fmt: skip
    from haocompact import files, pipeline, show

    source = None
    try:
        with files.open_source(path, sys.stdin.buffer) as source:
            try:
                for part in pipeline.conversations(source, request):
                    one(part, request)
            except TranscriptError as error:
                error.why = why(error, source) if why else None
                raise
    except HaoError as error:
        if why and source is None:
            error.why = why(error, None)
        if as_json:
            print(show.dumps(show.error_json(error, path)))
        _note(_error_line(error) + show.why_text(error))
        return error
    return None


def _one_target(output: Path | None, output_dir: Path | None, in_place: bool, dry_run: bool) -> str:
    given = [
        name
        for name, value in (("-o", output), ("--output-dir", output_dir), ("--in-place", in_place))
        if value
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other")
    if dry_run:
        return "dry run"
    return {"-o": "file", "--output-dir": "folder", "--in-place": "in place"}[given[0]] if given else "stdout"


def _to_targets(paths: list[str] | None, request: Request, where: str, output: Path | None, folder: Path | None,
                dry_run: bool) -> Iterator[Done]:  # fmt: skip
    from haocompact import files, pipeline

    names = [p for p, _ in _found(paths or ["-"])]
    if len(names) > 1 and where in ("stdout", "file"):
        raise UsageError(f"{len(names)} transcripts, one output: use --output-dir or --in-place")
    if output is not None and any(_same_file(output, name) for name in names):
        raise UsageError("-o names the transcript itself: use --in-place")
    if folder is not None:
        _one_name_each(names, folder, request.to)
        folder.mkdir(parents=True, exist_ok=True)
    for path in names:
        try:
            with files.open_source(path, sys.stdin.buffer) as source:
                target = None if dry_run else output or folder or sys.stdout.buffer
                yield pipeline.compact_to(source, request, target)
        except HaoError as error:
            yield pipeline.Done(path, error=error)


def _same_file(a: Path, b: str) -> bool:
    return a.exists() and os.path.exists(b) and os.path.samefile(a, b)


def _one_name_each(names: list[str], folder: Path, to: str) -> None:
    """Refuse to write one result over another, or over a transcript."""
    from haocompact.pipeline import output_name

    given: dict[Path, str] = {}
    for name in names:
        target = folder / output_name(name, to)
        if target in given:
            raise UsageError(f"{given[target]} and {name} would both become {target}")
        given[target] = name
        if _same_file(target, name):
            raise UsageError(f"--output-dir is the folder of {name} itself: use --in-place")


def _in_place(paths: list[str] | None, request: Request, choice: Choice, jobs: int, dask: str | None,
              as_json: bool, quiet: bool, verbose: bool, check: bool, dry_run: bool,
              prompts: bool) -> None:  # fmt: skip
    """One file that is named is reported as such; several, or a folder, are a batch with a table and totals."""
    from contextlib import ExitStack

    from haocompact import batch, show

    if not paths or "-" in paths:
        raise UsageError("--in-place needs files or folders")
    items = batch.find(paths, choice, request)
    many = len(paths) > 1 or any(item.in_folder for item in items)
    if not items and not many:
        raise TranscriptError("no transcript in it (*.jsonl, *.jsonl.gz, *.jsonl.zst)", path=", ".join(paths))
    report = show.BatchReport()
    with ExitStack() as stack:
        cluster = stack.enter_context(batch.connect(dask)) if dask else None
        results = batch.run(items, request, jobs, dry_run=dry_run, cluster=cluster)
        if not many:
            return _finish(list(_told(results, request, as_json, quiet, verbose, prompts)), check)
        stack.enter_context(heard())
        advance = stack.enter_context(_progress(len(items), as_json, quiet))
        for done in _told(results, request, as_json, quiet, verbose, prompts, in_batch=not verbose):
            report.add(done)
            advance()
    if as_json:
        print(show.dumps(show.totals_json(report.totals)))
    else:
        _print(show.batch_table(report))
        print("\n".join(show.totals_text(report.totals, dry_run=dry_run)))
    if report.totals.failed:
        raise typer.Exit(7)
    if check and not report.totals.compacted:
        raise typer.Exit(NothingToCompact.exit_code)


@contextmanager
def _progress(total: int, as_json: bool, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal, unless JSON lines run through the same one."""
    if quiet or not sys.stderr.isatty() or (as_json and sys.stdout.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    options: dict[str, bool] = {
        "transient": True,
        "redirect_stdout": False,
        "auto_refresh": False,
    }  # no thread
    with Progress(*columns, console=Console(stderr=True), **options) as bar:  # type: ignore[arg-type]
        task = bar.add_task("", total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def _told(
    done: Iterator[Done],
    request: Request,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    prompts: bool,
    in_batch: bool = False,
) -> Iterator[Done]:
    """Report each result as it comes: JSON lines on stdout, notes on stderr; of a batch only errors and warnings."""
    from haocompact import diag as lines
    from haocompact import show

    for one in done:
        if as_json:
            print(show.dumps(show.done_json(one, prompts)), flush=True)
        elif one.asks is not None:
            print("\n".join(show.asks_text(one, prompts)), flush=True)
        for warning in one.warnings:
            _note(f"warning: {show.place(warning)}", quiet)
        if one.degraded is not None:
            _note(f"degraded: {show.place(one.path)}: the summary failed ({show.visible(one.degraded)}); "
                  "an excerpt stands in its place")  # fmt: skip
        for line in (show.redacted_line(one), show.spent_line(one)):
            _note(line, quiet)
        if one.error is not None:
            _note(_error_line(one.error))
        elif not in_batch and one.asks is None:
            _note(lines.compaction_line(one.skip) if one.skip is not None else None, quiet)
            _note(show.done_line(one), quiet)
        for line in show.detail_lines(one, request.format) if verbose else ():
            _note(line)
        yield one


def _finish(results: list[Done], check: bool) -> None:
    """The exit code: a single transcript's own, 7 when some of several failed."""
    errors = [r.error for r in results if r.error is not None]
    if errors:
        raise typer.Exit(errors[0].exit_code if len(results) == 1 else 7)
    if check and all(r.skip is not None or r.left is not None for r in results):
        raise typer.Exit(NothingToCompact.exit_code)


def _show_log(path: Path, since: str | None, follow: bool, as_json: bool) -> None:
    from datetime import datetime

    from haocompact import show, skiplog

    start = skiplog.since(since, datetime.now().astimezone()) if since else None
    try:
        found = skiplog.read_log(path, start)
    except FileNotFoundError:
        if not follow:
            raise UsageError(
                f"no log at {path}: nothing was skipped yet, or it is elsewhere (--log FILE)"
            ) from None
        found = skiplog.Log(str(path), ())
    except OSError as error:
        raise TranscriptError(error.strerror or str(error), path=str(path)) from None
    if as_json and not follow:
        print(show.dumps(show.log_json(found)))
    elif not as_json:
        print("\n".join(show.log_text(found)), flush=True)
    for entry in skiplog.follow(path) if follow else ():
        print(show.dumps(show.entry_json(entry)) if as_json else show.entry_line(entry), flush=True)


def _verify(request: Request, as_json: bool) -> None:
    from haocompact import pipeline, show

    damages = list(pipeline.verify(request))
    for damage in damages:
        print(show.dumps({"version": 1, "hash": damage.hash, "damage": damage.what}) if as_json
              else f"{damage.hash}: {show.visible(damage.what)}")  # fmt: skip
    if damages:
        raise DamagedArchive(f"{len(damages)} damaged", path=", ".join(map(str, request.archives)))
    if not as_json:
        print("the archive is whole")


def _stats(request: Request, as_json: bool) -> None:
    from haocompact import show, upkeep

    for path, found in upkeep.stats(request):
        print(
            show.dumps(show.stats_json(path, found)) if as_json else "\n".join(show.stats_text(path, found))
        )


def _export(request: Request, folder: Path, as_json: bool) -> None:
    from haocompact import show, upkeep

    failed = 0
    for one in upkeep.export(request, folder):
        failed += one.error is not None
        if as_json:
            print(show.dumps(show.exported_json(one)))
        elif one.error is None:
            print(f"{show.visible(str(one.path))}  from {show.place(one.run.source)}, {one.run.created}")
        else:
            _note(_error_line(one.error))
    if failed:
        raise DamagedArchive(f"{failed} originals can't be written back")


def _prune(request: Request, folders: list[str], older_than: float, yes: bool, as_json: bool) -> None:
    from haocompact import show, upkeep

    runs = (
        upkeep.prune(request, folders, older_than) if yes else upkeep.prunable(request, folders, older_than)
    )
    for run in runs:
        print(show.dumps(show.run_json(run) | {"removed": yes}) if as_json else show.run_line(run))
    if as_json:
        return
    size = sum(run.input_size for run in runs)
    what = f"{len(runs)} originals ({size:,} bytes)"
    print(
        f"{what} removed"
        if yes
        else f"{what} have no transcript any more" + "; --yes removes them" * bool(runs)
    )


def _looks_like_hash(text: str) -> bool:
    digits = text.removeprefix("<<ccr:").removesuffix(">>")
    return len(digits) >= 16 and all(c in "0123456789abcdef" for c in digits) and not os.path.exists(text)


def _send(chunks: Iterator[bytes], output: Path | None) -> None:
    from haocompact import files

    if output is not None:
        with stage("restore"):
            return files.write_stream(output, chunks)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _print(renderable: Any) -> None:
    """As wide as the terminal; in a pipe or file as wide as it needs, without blanks at the ends of lines."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        return console.print(renderable)
    if "COLUMNS" not in os.environ:
        console.width = 1000
    with console.capture() as text:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))


def _note(line: str | None, quiet: bool = False) -> None:
    if line and not quiet:
        _STATUS.erase()
        print(line, file=sys.stderr)


class _Status:
    """The stage of long work, on the last line of a terminal for as long as it lasts."""

    drawn = False

    def __call__(self, name: str, seconds: float | None) -> None:
        self.erase()
        if seconds is None and not (name == "write" and sys.stdout.isatty()):
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
            self.drawn = True

    def erase(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self.drawn = False


_STATUS = _Status()
LONG = 8 << 20  # bytes of a transcript that takes long enough to be told what goes on


@contextmanager
def _telling(context: typer.Context, paths: list[str] | None, quiet: bool, verbose: bool) -> Iterator[None]:
    """With --verbose the settings, and what each stage took; else on a terminal the stage that long work is at."""
    if paths in (None, []) and sys.stdin.isatty():
        _note("haocompact: reads a transcript from the terminal; Ctrl-D ends it, --help says more", quiet)
    if verbose and not quiet:
        _note(_settings_line(context))
        with heard(lambda name, seconds: _note(None if seconds is None else f"{seconds:8.2f} s  {name}")):
            yield
    elif not quiet and sys.stderr.isatty() and any(map(_is_long, paths or ["-"])):
        with heard(_STATUS):
            yield
    else:
        yield


def _is_long(path: str) -> bool:
    return path == "-" or (os.path.isfile(path) and os.path.getsize(path) >= LONG)


UNTOLD = ("quiet", "verbose", "command", "instructions")  # the last two may say what nobody else need read


def _settings_line(context: typer.Context) -> str:
    """The settings that are no defaults, each with its source; all of them: plan --show-settings."""
    from haocompact import show

    root: Any = context.parent
    found = [_setting(context, root.default_map or {}, context.command, param) for param in context.command.params
             if param.opts[0].startswith("--") and param.name not in UNTOLD]  # fmt: skip
    return show.settings_line([s for s in found if s and s[2] != "default"], _settings_path())


def _error_line(error: HaoError) -> str:
    from haocompact.show import visible

    return f"haocompact: {visible(str(error))}"


def _usage_text(text: str) -> str:
    from haocompact.show import visible

    return text if text.startswith("Usage:") else f"haocompact: {visible(text)}"


def _reopen_closed_streams() -> None:
    """A stream that the caller closed reads as empty and takes anything: notes never end up in another one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


REPEATED = {"--include", "--exclude"}  # and --archive where it is read


def _refuse_doubled(words: list[str]) -> None:
    """The same setting twice on one command line is no setting: which one was meant?"""
    repeated = REPEATED | ({"--archive"} if words[:1] == ["retrieve"] else set())
    seen: dict[str, str] = {}
    for word, value in zip(words, [*words[1:], ""], strict=False):
        if word == "--":
            return
        name, equals, given = word.partition("=")
        if (
            name.startswith("--")
            and name not in repeated
            and seen.setdefault(name, given if equals else value) != (given if equals else value)
        ):
            raise UsageError(f"{name} is given twice", code="COMPACTION_CONFIG_TAKEN")


_EVERY = list(app.registered_commands)


@contextmanager
def _registered(names: list[str]) -> Iterator[None]:
    """Of the commands, only those named are made: Typer looks at every option of each. None named: all are."""
    before = app.registered_commands
    called = [c for c in _EVERY if c.callback is not None and c.callback.__name__ in names]
    app.registered_commands = called or _EVERY
    try:
        yield
    finally:
        app.registered_commands = before


def _commands() -> Mapping[str, Any]:
    """All commands by name, also those that were not made for this call."""
    with _registered([]):
        return get_group(app).commands


def main() -> NoReturn:
    """Run the command line: a HaoError is one line on stderr and its exit code; a closed pipe is no error."""
    _reopen_closed_streams()
    gc.set_threshold(100_000, 50, 100)  # next to nothing here runs in circles
    sys.setrecursionlimit(
        20_000
    )  # the parser reads 1,024 levels; what walks them needs several frames a level
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        _refuse_doubled(sys.argv[1:])
        with _registered(sys.argv[1:2]):
            code = app(standalone_mode=False, prog_name="haocompact") or 0
        sys.stdout.flush()
    except HaoError as error:
        print(_error_line(error), file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except SystemExit as exit:
        if not isinstance(exit.__context__, BrokenPipeError):  # Typer turns a closed pipe into an exit
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except typer.Abort:
        code = 130
    except OSError as error:
        print(f"haocompact: can't write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 7
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        print(_usage_text(error.format_message()), file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
