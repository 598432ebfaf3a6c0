"""The command line of `elastane run`, read as torchrun reads it."""

import pytest

from elastane.errors import UsageError
from elastane.options.parser import OptionValues, RunParser, parse
from elastane.options.table import BY_DEST, TABLE


def read(*argv, **environ):
    return parse(argv, environ)


def test_every_name_is_given_once():
    spellings = [spelling for option in TABLE for spelling in option.spellings]
    assert len(spellings) == len(set(spellings))
    assert len(BY_DEST) == len(TABLE)


@pytest.mark.parametrize("option", TABLE, ids=lambda option: option.name)
def test_each_option_is_read_in_every_spelling_and_from_its_variable(option):
    value = option.choices[0] if option.choices else "7"
    for spelling in option.spellings:
        if option.kind == "flag":
            found = [read(spelling, "s.py")]
        else:
            found = [read(spelling, value, "s.py")]
            if spelling.startswith("--"):
                found.append(read(f"{spelling}={value}", "s.py"))
            else:
                found.append(read(f"{spelling}{value}", "s.py"))
        for options in found:
            assert options.given == {option.dest}
            assert options.script == "s.py"
            assert options.text(option.dest) == ("1" if option.kind == "flag" else value)
    if option.env:
        variable = "1" if option.kind == "flag" else value
        options = read("s.py", **{option.env: variable})
        assert options.given == {option.dest}
        assert options.text(option.dest) == variable


def test_the_command_line_wins_over_the_variable_and_an_empty_variable_is_none():
    assert read("--nnodes", "2", "s.py", PET_NNODES="3").text("nnodes") == "2"
    assert read("s.py", PET_NNODES="3").text("nnodes") == "3"
    assert read("s.py", PET_NNODES="").given == frozenset()


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_a_flag_variable_may_be_any_yes(word):
    assert read("s.py", PET_STANDALONE=word).flag("standalone")


@pytest.mark.parametrize("word", ["0", "false", "No", "off"])
def test_a_flag_variable_may_be_any_no(word):
    assert not read("s.py", PET_STANDALONE=word).flag("standalone")


def test_a_flag_variable_that_is_neither_is_refused_by_name():
    with pytest.raises(UsageError, match="standalone") as caught:
        read("s.py", PET_STANDALONE="maybe").flag("standalone")
    assert "PET_STANDALONE" in caught.value.where


def test_words_after_the_script_belong_to_the_script():
    options = read("--nnodes", "2", "s.py", "--nnodes", "9", "-m", "--", "-x", "--no-such")
    assert options.text("nnodes") == "2"
    assert options.script_args == ("--nnodes", "9", "-m", "--", "-x", "--no-such")


def test_two_dashes_end_the_options():
    options = read("--nnodes", "2", "--", "s.py", "--a")
    assert (options.script, options.script_args) == ("s.py", ("--a",))


def test_an_option_may_be_shortened_while_it_is_unique_among_torchruns():
    options = read("--nno", "2", "--nproc", "4", "--max_r=3", "--te", "1", "s.py")
    assert options.given == {"nnodes", "nproc_per_node", "max_restarts", "tee"}
    # Our options leave torchrun's short forms unique: --t is --tee, not --token-file or --tls-cert.
    assert read("--t", "3", "s.py").text("tee") == "3"
    assert read("--no-p", "s.sh").flag("no_python")


def test_options_of_elastane_are_never_shortened():
    with pytest.raises(UsageError) as caught:
        read("--prel", "torch", "s.py")
    assert caught.value.slug == "unknown-option"
    assert "--preload" in caught.value.expected


def test_an_ambiguous_option_names_what_it_could_be():
    with pytest.raises(UsageError, match="ambiguous") as caught:
        read("--rdzv", "x", "s.py")
    assert "--rdzv-backend" in caught.value.expected
    assert "--rdzv-id" in caught.value.expected


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("--nnods", "--nnodes"), ("--standalon3", "--standalone"), ("--hlep", "--help")],
)
def test_a_typo_gets_the_nearest_name(typo, meant):
    with pytest.raises(UsageError) as caught:
        read(typo, "2", "s.py")
    assert meant in caught.value.expected


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--use_env", "leave it out"),
        ("--autotune_level=1", "BAGUA_AUTOTUNE"),
        ("--enable_bagua_net", "LD_LIBRARY_PATH"),
        ("--default-bucket-size", "BAGUA_DEFAULT_BUCKET_SIZE"),
    ],
)
def test_an_option_of_another_launcher_gets_what_to_write_in_its_place(option, instead):
    with pytest.raises(UsageError) as caught:
        read(option, "s.py")
    assert instead in caught.value.next_step


def test_a_missing_script_or_value_is_a_usage_error():
    for argv in ([], ["--nnodes", "2"], ["--nnodes"], ["--start-method", "x", "s.py"]):
        with pytest.raises(UsageError):
            read(*argv)
    with pytest.raises(UsageError):
        read("s.py", PET_START_METHOD="thread")


def test_a_negative_number_is_a_value_and_an_option_is_not():
    assert read("--node-rank", "-1", "s.py").text("node_rank") == "-1"
    assert read("--role=-x", "s.py").text("role") == "-x"
    # A forgotten value never swallows the option after it.
    with pytest.raises(UsageError, match="--log-dir without a value, and --standalone"):
        read("--log-dir", "--standalone", "s.py")


def test_a_flag_takes_no_value():
    with pytest.raises(UsageError, match="--standalone takes no value, and has 'yes'"):
        read("--standalone=yes", "s.py")


def test_no_script_is_a_usage_error_unless_only_the_configuration_is_asked_for():
    with pytest.raises(UsageError, match="no script"):
        read("--nnodes", "2")
    assert read("--nnodes", "2", "--show-config").script == ""


def test_an_unknown_choice_gets_the_nearest():
    with pytest.raises(UsageError) as caught:
        read("--start-method", "forkservre", "s.py")
    assert "did you mean forkserver?" in caught.value.expected


def test_each_value_knows_its_origin():
    settings = OptionValues("/p/elastane.toml", {"role": "f", "nnodes": "4", "tee": "3"})
    options = parse(["--tee", "1", "s.py"], {"PET_NNODES": "2"}, settings=settings)
    assert str(options.origin("tee")) == "command line"
    assert str(options.origin("nnodes")) == "variable PET_NNODES"
    assert str(options.origin("role")) == "file /p/elastane.toml"
    assert str(options.origin("rdzv_id")) == "default"
    assert [options.text(dest) for dest in ("tee", "nnodes", "role")] == ["1", "2", "f"]


def test_a_bad_value_is_reported_with_its_origin():
    for argv, environ, where in (
        (["--max-restarts", "x"], {}, "command line"),
        ([], {"PET_MAX_RESTARTS": "x"}, "variable PET_MAX_RESTARTS"),
    ):
        with pytest.raises(UsageError, match="--max-restarts = 'x'") as caught:
            parse([*argv, "s.py"], environ)
        assert caught.value.where == where


def test_a_text_for_a_number_is_refused_with_the_option():
    with pytest.raises(UsageError, match="--max-restarts = 'x'"):
        read("--max-restarts", "x", "s.py").whole("max_restarts")
    with pytest.raises(UsageError, match="--drain-timeout = 'x'"):
        read("--drain-timeout", "x", "s.py").seconds("drain_timeout")


def test_split_of_nothing_is_nothing():
    assert RunParser.names.split([]) == ([], [])
    assert RunParser.names.split(["-"]) == ([], ["-"])
