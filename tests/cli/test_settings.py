"""The settings file: its place, its content, and the origin of each value."""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from elastane.cli import main as cli
from elastane.cli.run import read_options
from elastane.errors import ConfigurationError, UsageError
from elastane.options import settings as files
from elastane.options.build import build
from elastane.options.parser import RunParser, add_options, parse
from elastane.options.table import TABLE, Option


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Enter a project with a script, without variables of the environment."""
    for option in TABLE:
        monkeypatch.delenv(option.env, raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(*argv, **environ):
    parser = RunParser(prog="elastane run", allow_abbrev=False)
    add_options(parser)
    return read_options(parser.parse_args([*argv, "train.py"]), environ)


def write(folder, text, name="elastane.toml"):
    (folder / name).write_text(text)
    return folder / name


def refused(slug):
    with pytest.raises(ConfigurationError) as caught:
        options()
    assert caught.value.slug == slug, caught.value
    return str(caught.value)


# Its place


def test_without_a_file_no_option_is_set(here):
    assert options().given == frozenset()


def test_the_nearest_file_up_to_the_project_is_read(here, monkeypatch):
    path = write(here, "[run]\nnnodes = 3\n")
    (here / "src" / "deep").mkdir(parents=True)
    for folder in (here, here / "src", here / "src" / "deep"):
        monkeypatch.chdir(folder)
        assert options().text("nnodes") == "3"
        assert str(options().origin("nnodes")) == f"file {path}"
    write(here / "src", "[run]\nnnodes = 4\n")
    assert options().text("nnodes") == "4", "the nearest file is not used"


def test_elastane_toml_takes_precedence_over_pyproject(here):
    path = write(here, "[tool.elastane.run]\nrole = 'p'\n", "pyproject.toml")
    assert options().origin("role").name == str(path)
    write(here, "[run]\nnnodes = 2\n")
    assert options().text("role") == "default"
    assert options().text("nnodes") == "2"


@pytest.mark.parametrize("text", ["[tool.other]\nx = 1\n", "not = toml = at all", "elastane = 1\n"])
def test_a_pyproject_without_our_table_is_ignored(here, text):
    write(here, text, "pyproject.toml")
    assert options().given == frozenset()


def test_a_pyproject_inside_the_repository_does_not_hide_a_file_above(here, monkeypatch):
    write(here, "[run]\nnnodes = 3\n")
    package = here / "package"
    package.mkdir()
    write(package, "[project]\nname = 'x'\n", "pyproject.toml")
    monkeypatch.chdir(package)
    assert options().text("nnodes") == "3"


def test_files_above_the_project_are_not_read(here, monkeypatch):
    write(here, "[run]\nnnodes = 3\n")
    inner = here / "inner"
    (inner / ".git").mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert options().given == frozenset()


def test_a_file_or_a_folder_can_be_named(here, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    path = write(other, "[run]\nnnodes = 7\n")
    write(here, "[run]\nnnodes = 3\n")
    assert options("--config", str(path)).text("nnodes") == "7"
    assert options("--config", str(other)).text("nnodes") == "7"
    assert options(ELASTANE_CONFIG=str(path)).text("nnodes") == "7"
    assert options("--config", "/dev/null", ELASTANE_CONFIG=str(path)).text("nnodes") == "1:1"
    for name in ("none.toml", str(here / ".git")):
        with pytest.raises(ConfigurationError, match="settings-file"):
            options("--config", name)


def test_a_file_of_another_user_in_a_world_writable_folder_is_refused(here, monkeypatch):
    path = write(here, "[run]\npreload = ['evil']\n")
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid == 0:
        os.chown(path, 4711, -1)
    assert options().text("preload") == "evil", "a folder that others cannot write is not trusted"
    here.chmod(here.stat().st_mode | stat.S_IWOTH)
    assert "another user" in refused("settings-file")
    assert options("--config", str(path)).text("preload") == "evil", "a named file is refused"


# Its content


def test_every_kind_of_value_means_the_same_as_on_the_command_line(here):
    write(
        here,
        """
[run]
nnodes = "1:4"
nproc_per_node = 2
rdzv-id = 42
standalone = true
no-zygote = false
max-restarts = 3
drain-timeout = 2.5
shutdown-timeout = 7
start-method = "fork"
signals-to-handle = ["SIGTERM", "SIGUSR2"]
local-ranks-filter = [0, 1]
redirects = 3
tee = "0:1,1:2"
preload = ["json", "csv"]
rdzv-conf = { join_timeout = 60, is_host = true, silence = 2.5 }
duplicate-stdout-filters = ["a,b", "c"]
duplicate-stderr-filters = "x,,y"
""",
    )
    argv = """--nnodes 1:4 --nproc-per-node 2 --rdzv-id 42 --standalone --max-restarts 3
        --drain-timeout 2.5 --shutdown-timeout 7 --start-method fork
        --signals-to-handle SIGTERM,SIGUSR2 --local-ranks-filter 0,1 --redirects 3 --tee 0:1,1:2
        --preload json,csv --rdzv-conf join_timeout=60,is_host=true,silence=2.5
        --duplicate-stdout-filters a,,b,c --duplicate-stderr-filters x,,y"""
    expected = parse([*argv.split(), "train.py"], {})
    found = options()
    assert dict(found.values) == {**expected.values, "no_zygote": "0"}
    assert found.given == expected.given | {"no_zygote"}


def test_a_path_is_relative_to_the_folder_of_the_file(here, monkeypatch):
    write(here, "[run]\nlog-dir = 'logs'\ntoken-file = '/etc/token'\n")
    (here / "sub").mkdir()
    monkeypatch.chdir(here / "sub")
    assert options().text("log_dir") == str(here / "logs")
    assert options().text("token_file") == "/etc/token"


def test_the_command_line_precedes_the_variable_and_the_variable_the_file(here):
    write(here, "[run]\nnnodes = 2\nstandalone = true\n")
    assert options().text("nnodes") == "2"
    assert options(PET_NNODES="3").text("nnodes") == "3"
    assert options("--nnodes", "4", PET_NNODES="3").text("nnodes") == "4"
    assert not options(PET_STANDALONE="0").flag("standalone")


def test_an_error_is_preceded_by_the_settings_in_effect(here, capsys):
    path = write(here, "[run]\nnproc-per-node = 3\n")
    assert build(options(), {}).node.local_world_size == 3
    write(here, "[run]\nstandalone = true\n")
    assert cli.main(["run", "--nnodes", "2", "train.py"]) == 78
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == f"elastane: from {path}: standalone"
    assert "standalone-nodes" in second


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("[run]\nnproc-per-nod = 2\n", "did you mean nproc-per-node?"),
        ("[run]\nnnode = 2\n", "did you mean nnodes?"),
        ("[run]\nconfig = 'x'\n", "elastane run"),
        ("[run]\nshow-config = true\n", "elastane run"),
        ("[rum]\nnnodes = 2\n", "[run]"),
        ("nnodes = 2\n", "nnodes below [run]"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(here, text, nearest):
    path = write(here, text)
    said = refused("settings-key")
    assert str(path) in said
    assert nearest in said


@pytest.mark.parametrize(
    "line",
    [
        'standalone = "yes"',
        "standalone = 1",
        'max-restarts = "3"',
        "max-restarts = 1.5",
        "max-restarts = true",
        'drain-timeout = "soon"',
        "role = true",
        "role = ['a']",
        "nnodes = 2026-01-01",
        "start-method = 1",
        "preload = ['a,b', 'c']",
        "preload = [['a']]",
        "duplicate-stdout-filters = [1]",
        "rdzv-conf = { a = [1] }",
        "rdzv-conf = { a = '1,b=2' }",
        "rdzv-conf = 1",
        "log-dir = 1",
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_file_key_and_expected_form(here, line):
    path = write(here, f"[run]\n{line}\n")
    said = refused("settings-value")
    assert str(path) in said
    assert line.split(" = ")[0] in said
    assert "expected:" in said


def test_an_invalid_value_is_refused_with_the_name_of_the_file(here):
    path = write(here, "[run]\nstart-method = 'thread'\n")
    with pytest.raises(UsageError) as caught:
        options()
    assert caught.value.where == f"file {path}"


def test_an_option_given_in_two_spellings_is_refused(here):
    write(here, "[run]\nlog-dir = 'a'\nlog_dir = 'b'\n")
    assert "log-dir once" in refused("settings-value")


@pytest.mark.parametrize(
    "text", ["[run\n", "run = 3\n", "[run]\nx = 'é".encode()[:-1], b"\xff\xfe"]
)
def test_a_file_that_is_not_toml_is_refused(here, text):
    path = here / "elastane.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=r"settings-(file|value)") as caught:
        options()
    assert str(path) in str(caught.value)


def test_a_file_beyond_the_size_limit_is_not_read(here, monkeypatch):
    monkeypatch.setattr(files, "SETTINGS_BYTES_MAX", 10)
    write(here, "[run]\n# " + "x" * 100)
    assert "over 10 bytes" in refused("settings-file")


@pytest.mark.parametrize(
    "line", ["rdzv-conf = { token = 'hush' }", "rdzv-conf = 'silence=4, my-token =hush'"]
)
def test_a_secret_in_the_file_is_refused_and_not_printed(here, line):
    write(here, f"[run]\n{line}\n")
    said = refused("settings-secret")
    assert "token-file" in said
    assert "hush" not in said


def test_every_option_of_the_file_is_in_the_table():
    assert {option.name for option in TABLE if not option.setting} == {
        "config",
        "show-config",
        "json",
    }
    assert all(isinstance(option, Option) for option in TABLE)


# --show-config


def test_show_config_names_every_value_with_its_origin_and_starts_nothing(here, capsys):
    path = write(here, "[run]\nrole = 'fromfile'\n")
    code = cli.main(["run", "--nnodes", "2", "--show-config", "train.py", "--lr", "0.1 x"])
    assert code == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("  --")}
    assert set(lines) == {f"--{option.name}" for option in TABLE if option.setting}
    assert lines["--nnodes"] == ["--nnodes", "2", "command", "line"]
    assert lines["--role"] == ["--role", "fromfile", "file", str(path)]
    assert lines["--max-restarts"] == ["--max-restarts", "0", "default"]
    assert lines["--standalone"][1] == "no"
    assert "script: train.py --lr '0.1 x'" in out


def test_show_config_as_json_has_types(here, capsys, monkeypatch):
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    assert cli.main(["run", "--standalone", "--show-config", "--json", "s.py", "-x"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["max-restarts"] == {
        "value": 3,
        "origin": "variable",
        "name": "PET_MAX_RESTARTS",
    }
    assert found["options"]["standalone"]["value"] is True
    assert found["options"]["monitor-interval"]["value"] == 0.1
    assert found["options"]["log-dir"] == {"value": None, "origin": "default", "name": ""}
    assert (found["script"], found["script_args"]) == ("s.py", ["-x"])


def test_show_config_needs_no_script_and_no_valid_job(here, capsys):
    assert cli.main(["run", "--show-config", "--nnodes", "1:2:3"]) == 0
    assert "1:2:3" in capsys.readouterr().out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_show_config_never_shows_a_secret(here, capsys, monkeypatch, form):
    monkeypatch.setenv("ELASTANE_TOKEN", "hush-variable")
    conf = "silence=4,token=hush-conf, etcd_Password = hush-word,join_timeout=9"
    endpoint = "https://user:hush-user@etcd:2379"
    argv = ["--rdzv-conf", conf, "--rdzv-endpoint", endpoint]
    assert cli.main(["run", "--show-config", *form, *argv]) == 0
    out = capsys.readouterr().out
    assert "hush" not in out
    assert "silence=4,token=***, etcd_Password =***,join_timeout=9" in out
    assert "ELASTANE_TOKEN" in out, "the output does not show that a secret is set"
    assert "etcd:2379" in out


def test_a_refused_value_is_reported_with_its_origin(here, capsys, monkeypatch):
    path = write(here, "[run]\nnproc-per-node = 'gup'\n")
    assert cli.main(["run", "train.py"]) == 2
    assert f"where: file {path}" in capsys.readouterr().err
    monkeypatch.setenv("PET_NNODES", "0")
    assert cli.main(["run", "--nproc-per-node", "1", "train.py"]) == 2
    assert "where: variable PET_NNODES" in capsys.readouterr().err
    assert cli.main(["run", "--nnodes", "0", "train.py"]) == 2
    assert "where:" not in capsys.readouterr().err


def test_json_alone_is_a_usage_error(here, capsys):
    assert cli.main(["run", "--json", "train.py"]) == 2
    assert "--show-config" in capsys.readouterr().err


def test_the_file_of_the_documentation_is_read(here):
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    write(here, example)
    found = options()
    assert len(found.given) == 7
    assert found.text("log_dir") == str(here / "logs")
    assert found.text("token_file") == str(Path("~/.elastane-token").expanduser())
