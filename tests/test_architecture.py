"""The house rules that a reader can't see at a glance: who imports whom, and what an import costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from haocompact import errors

PACKAGE = ROOT / "haocompact"
MODULES = {
    str(p.relative_to(PACKAGE).with_suffix("")).replace("/", "."): p for p in sorted(PACKAGE.rglob("*.py"))
}
BASE = {"errors", "stages", "jsjson", "cjk", "prompts", "records", "compaction", "archive", "redact"}
MIDDLE = BASE | {"ccr", "segment", "ledger", "chunks", "summarize", "model", "diag", "skiplog", "formats.session",
                 "formats.document"}  # fmt: skip
LEDGER = [
    "lines",
    "wording",
    "outputs",
    "entries",
    "budget",
    "reader",
    "rules",
]  # each imports those before it
PIPELINE = ["planning", "compacting", "explaining", "writing", "retrieving"]  # each imports those before it
SHOW = ["text", "plans", "diagnoses", "logs", "settings", "results", "segments"]
ADAPTERS = {
    m
    for m in MODULES
    if m.startswith("formats.") and m not in ("formats.session", "formats.document", "formats.__init__")
}
FORMATS = MIDDLE | ADAPTERS | {"formats"}
ALLOWED = {  # module -> what it may import of haocompact
    "__init__": {"api", "compaction", "errors"},
    "api": MIDDLE | {"formats", "files", "pipeline"},
    "__main__": {"cli"},
    "errors": set(),
    "jsjson": set(),
    "stages": set(),
    "cjk": set(),
    "prompts": set(),
    "records": {"errors"},
    "compaction": {"errors", "cjk", "jsjson"},
    "archive": {"errors"},
    "redact": set(),
    **{f"ledger.{m}": {"compaction", *(f"ledger.{o}" for o in LEDGER[:i])} for i, m in enumerate(LEDGER)},
    "ledger.lines": {"redact"},
    "ledger.__init__": {f"ledger.{m}" for m in LEDGER},
    **dict.fromkeys(
        (
            "ccr",
            "segment",
            "chunks",
            "summarize",
            "model",
            "diag",
            "skiplog",
            "formats.session",
            "formats.document",
        ),
        MIDDLE,
    ),
    "convert": MIDDLE,
    **dict.fromkeys(ADAPTERS, MIDDLE),
    "formats.__init__": MIDDLE | ADAPTERS,
    "files": {"errors", "records"},
    "logged": MIDDLE | {"formats"},
    "pipeline.__init__": {f"pipeline.{m}" for m in PIPELINE},
    **{
        f"pipeline.{m}": MIDDLE | {"formats", "files"} | {f"pipeline.{o}" for o in PIPELINE[:i]}
        for i, m in enumerate(PIPELINE)
    },
    "batch": BASE | {"files", "pipeline", "summarize", "__init__"},
    "upkeep": BASE | {"files", "pipeline"},
    "show.__init__": {f"show.{m}" for m in SHOW},
    **{
        f"show.{m}": MIDDLE | {"formats", "pipeline", "batch", "upkeep"} | {f"show.{o}" for o in SHOW[:i]}
        for i, m in enumerate(SHOW)
    },
    "draw": MIDDLE | {"pipeline", "show"},
    "cli": FORMATS | {"files", "pipeline", "batch", "upkeep", "show", "draw", "__init__"},
}
ALLOWED["pipeline.compacting"] |= {"convert"}
ALLOWED["pipeline.retrieving"] |= {"logged"}
INSIDE = {"formats.anthropic", "formats.openai_chat", "formats.responses"}  # what stands in a request
ALLOWED["formats.requests"] |= INSIDE
THIRD_PARTIES = {  # package -> modules that may import it at their top, and inside functions
    "typer": ({"cli"}, {"cli"}),
    "rich": (set(), {*(f"show.{m}" for m in SHOW), "cli"}),
    "openai": (set(), {"model"}),
    "detect_secrets": (set(), {"redact"}),
    "tiktoken": (set(), {"compaction"}),
    "zstandard": ({"archive"}, {"archive", "files"}),
    "orjson": ({"records", *ADAPTERS}, {"records"}),
    "platformdirs": (set(), {"cli"}),
    "distributed": (set(), {"batch"}),
}


def imports_of(path):
    """(module, whether at the top of the file, whether for types only) of every import."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body:
        yield from _imports(node, top=True, typing=False)


def _imports(node, top, typing):
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        typing = True
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        top = False
    if isinstance(node, ast.Import):
        yield from ((alias.name, top, typing) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        inner = [
            n
            for n in names
            if n.removeprefix("haocompact.") in {m.removesuffix(".__init__") for m in MODULES}
        ]
        yield from ((name, top, typing) for name in (inner or [node.module]))
        assert node.level == 0, "relative import"
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, top, typing)


def own(name):
    """`haocompact.formats.pi` -> formats.pi; `haocompact` itself -> __init__; another package -> None."""
    if name == "haocompact":
        return "__init__"
    return name.removeprefix("haocompact.") if name.startswith("haocompact.") else None


def test_every_module_has_its_rule():
    assert set(MODULES) <= set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    found = {name for n, _, typing in imports_of(MODULES[module]) if (name := own(n)) and not typing}
    assert found - ALLOWED[module] - {module} == set()


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_adapters_never_import_each_other(adapter):
    found = {own(n) for n, _, _ in imports_of(MODULES[adapter])}
    inside = INSIDE if adapter == "formats.requests" else set()
    assert found & (ADAPTERS - {adapter} - inside | {"formats", "pipeline"}) == set()


def test_no_circles():
    needs = {
        m.removesuffix(".__init__"): {own(n) for n, top, typing in imports_of(p) if top and not typing}
        for m, p in MODULES.items()
    }

    def below(module, path=()):
        assert module not in path, path
        for other in needs.get(module, set()) - {None}:
            below(other, (*path, module))

    for module in needs:
        below(module)


@pytest.mark.parametrize("package", THIRD_PARTIES)
def test_third_parties_stay_where_they_belong(package):
    at_top, inside = THIRD_PARTIES[package]
    found = [
        (m, top)
        for m, p in MODULES.items()
        for n, top, typing in imports_of(p)
        if n.partition(".")[0] == package and not typing
    ]
    assert {m for m, top in found if top} <= at_top
    assert {m for m, top in found if not top} <= inside


def test_no_other_third_party():
    names = {n.partition(".")[0] for p in MODULES.values() for n, _, _ in imports_of(p)}
    assert names - set(sys.stdlib_module_names) - {"haocompact"} <= set(THIRD_PARTIES)


def test_every_dependency_is_used():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for e in project["optional-dependencies"].values() for d in e)]
    names = {d.split(">")[0].split("[")[0].replace("-", "_") for d in wanted}
    used = {n.partition(".")[0] for p in MODULES.values() for n, _, _ in imports_of(p)}
    assert names - {"openai"} <= used
    assert used & set(THIRD_PARTIES) <= names


def loaded(code):
    """The modules that a fresh interpreter holds after `code`, those it starts with left out."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_importing_the_package_does_no_work():
    found = loaded("import haocompact; haocompact.__version__")
    assert {m for m in found if m.startswith("haocompact")} == {"haocompact"}
    assert not found & {"typer", "rich", "orjson", "zstandard", "openai", "tiktoken"}


def test_importing_the_command_line_loads_no_pipeline():
    found = loaded("import haocompact.cli")
    assert {m for m in found if m.startswith("haocompact")} == {
        "haocompact",
        "haocompact.cli",
        "haocompact.stages",
        "haocompact.errors",
    }
    assert not {m.partition(".")[0] for m in found} & {
        "rich",
        "orjson",
        "zstandard",
        "openai",
        "tiktoken",
        "sqlite3",
    }


def test_importing_writes_and_prints_nothing(tmp_path):
    names = ", ".join(f"haocompact.{m}" for m in MODULES if not m.endswith(("__init__", "__main__")))
    done = subprocess.run(
        [sys.executable, "-c", f"import {names}"],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=True,
        env={"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == (b"", b"", [])


# -------------------------------------------------------------------------------------- errors
ERRORS = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.HaoError)]


def test_every_error_has_its_own_code_string():
    codes = [c.code for c in ERRORS]
    assert len(set(codes)) == len(codes)
    assert all(code.isupper() and code.replace("_", "").isalpha() for code in codes)


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_is_documented_with_its_exit_code(error):
    assert error.__doc__
    (line,) = [x for x in errors.__doc__.splitlines() if error.__name__ in x.split()]
    if error is not errors.HaoError:
        assert int(line.split(error.__name__)[1].split()[0]) == error.exit_code
        assert 2 <= error.exit_code <= 7
    assert error.exit_code == (1 if error is errors.HaoError else error.exit_code)


def test_an_error_is_one_line_with_its_place():
    assert str(errors.TranscriptError("a\n  b", path="s.jsonl", line=3)) == "s.jsonl:3: a b"
    assert str(errors.TranscriptError("a", path="s.jsonl")) == "s.jsonl: a"
    assert str(errors.UsageError("a", code="X")) == "a"
    assert errors.UsageError("a", code="X").code == "X"


def test_errors_travel_between_processes():
    import pickle

    for error in (
        errors.TranscriptError("a", path="p", line=2),
        errors.UsageError("a", code="X"),
        errors.SourceBusy("b", path="q"),
    ):
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back), back.code, back.path, back.line) == (
            type(error),
            str(error),
            error.code,
            error.path,
            error.line,
        )


@pytest.mark.parametrize("module", [m for m in MODULES if "__" not in m])
def test_every_module_says_what_it_is_for(module):
    assert ast.get_docstring(ast.parse(MODULES[module].read_text("utf-8")))


def test_nothing_mentions_this_machine():
    for path in (*MODULES.values(), *Path(__file__).parent.glob("*.py")):
        text = path.read_text("utf-8")
        assert "/" + "tmp/v" not in text
        assert "/" + "work/" not in text
