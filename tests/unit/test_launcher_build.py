"""Options and environment give a checked configuration, or an error with a next step."""

import os
import shutil
from pathlib import Path

import pytest

import elastane
from elastane.errors import ConfigurationError, ElastaneError, UsageError
from elastane.options.build import build, read_nnodes, read_nproc
from elastane.options.facts import cpu_count
from elastane.options.parser import parse


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def make(script):
    def run(*argv, **environ):
        return build(parse([*argv, script], environ), environ)

    return run


def refused(make, *argv, slug, error=ElastaneError, **environ):
    with pytest.raises(error) as caught:
        make(*argv, **environ)
    assert caught.value.slug == slug, caught.value
    return caught.value


# Where the nodes meet


def test_one_node_without_options_is_a_standalone_job(make):
    for argv in (
        (),
        ("--standalone",),
        ("--nproc-per-node", "2"),
        ("--rdzv-backend", "c10d"),
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        ("--rdzv-endpoint", "localhost:0"),
        ("--node-rank", "0", "--master-addr", "10.0.0.1"),
    ):
        config = make(*argv)
        assert config.rendezvous.backend == "standalone"
        assert config.rendezvous.hosts is True
        assert config.rendezvous.alone
        assert (config.spec.min_nodes, config.spec.max_nodes) == (1, 1)


def test_standalone_overrides_backend_and_endpoint_and_keeps_the_name(make):
    config = make(
        "--standalone", "--rdzv-backend", "c10d", "--rdzv-endpoint", "far:1", "--rdzv-id", "mine"
    )
    assert config.rendezvous.backend == "standalone"
    assert config.spec.job == "mine"


def test_standalone_replaces_an_unusable_name_by_a_random_one(make):
    job = make("--standalone", "--rdzv-id", "team/run 7").spec.job
    assert "/" not in job and job != "team/run 7"


def test_standalone_of_several_nodes_is_refused(make):
    refused(make, "--standalone", "--nnodes", "2", slug="standalone-nodes")
    assert make("--standalone", "--nnodes", "1:4").spec.max_nodes == 1


def test_an_endpoint_selects_the_elastane_backend(make):
    for argv in ((), ("--rdzv-backend", "c10d"), ("--rdzv-backend", "elastane")):
        config = make("--nnodes", "1:4", "--rdzv-endpoint", "10.1.2.3", *argv)
        found = config.rendezvous
        assert (found.backend, found.host, found.port) == ("elastane", "10.1.2.3", 29400)
        assert found.hosts is None
    assert make("--nnodes", "2", "--rdzv-endpoint", "[::1]:77").rendezvous.port == 77


def test_is_host_is_honoured(make):
    argv = ("--nnodes", "2", "--rdzv-endpoint", "far", "--rdzv-conf")
    assert make(*argv, "is_host=true").rendezvous.hosts is True
    assert make(*argv, "is_host=0").rendezvous.hosts is False


def test_static_is_hosted_by_node_rank_0_at_the_master_address(make):
    for rank in (0, 1):
        config = make(
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            "--master-addr",
            "10.0.0.1",
            PET_MASTER_PORT="7",
        )
        found = config.rendezvous
        assert (found.backend, found.host, found.port) == ("static", "10.0.0.1", 7)
        assert found.hosts is (rank == 0)
        assert config.node.node_rank == rank


def test_a_static_rank_is_exact_and_0_by_default(make):
    config = make("--nnodes", "2", "--master-addr", "a")
    assert config.spec.static
    assert config.node.node_rank == 0
    argv = ("--nnodes", "3", "--master-addr", "a", "--rdzv-conf", "rank=2")
    assert make(*argv).node.node_rank == 2
    assert make(*argv, "--node-rank", "1").node.node_rank == 1
    assert not make("--nnodes", "2", "--rdzv-endpoint", "h").spec.static


def test_static_takes_a_bare_ipv6_address(make):
    config = make("--nnodes", "2", "--master-addr", "::1", "--node-rank", "1")
    assert (config.rendezvous.host, config.rendezvous.port) == ("::1", 29500)


def test_several_nodes_without_an_endpoint_are_refused(make):
    error = refused(make, "--nnodes", "2", slug="endpoint-missing", error=ConfigurationError)
    assert "--rdzv-endpoint" in error.next_step


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_agents_of_mpirun_that_would_not_meet_are_refused(make, variable):
    error = refused(make, slug="endpoint-missing", **{variable: "4"})
    assert f"{variable} = 4: MPI starts 4 agents" in str(error)
    for argv in (
        ("--standalone",),
        ("--nnodes", "1"),
        ("--nnodes", "4", "--rdzv-endpoint", "node0:29400"),
    ):
        make(*argv, **{variable: "4"})
    assert make(**{variable: "1"}).rendezvous.backend == "standalone"


def test_static_cannot_be_elastic_nor_hold_an_impossible_rank(make):
    refused(make, "--nnodes", "1:2", "--master-addr", "a", slug="static-elastic")
    refused(make, "--nnodes", "2", "--node-rank", "2", slug="node-rank")
    refused(make, "--nnodes", "2", "--node-rank", "-1", slug="node-rank")


def test_file_takes_the_endpoint_as_a_folder(make, tmp_path):
    argv = ("--rdzv-backend", "file", "--nnodes", "2", "--rdzv-id", "j")
    found = make(*argv, "--rdzv-endpoint", "shared").rendezvous
    assert (found.backend, found.store) == ("file", str(tmp_path / "shared"))
    refused(make, *argv, slug="endpoint-missing")
    refused(make, *argv, "--rdzv-endpoint", "train.py", slug="endpoint-missing")


KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://kube:6443"}}]
contexts: [{name: c, context: {cluster: c, namespace: own}}]
current-context: c
"""


def test_kubernetes_uses_the_endpoint_or_the_contexts_namespace(make, tmp_path):
    argv = ("--rdzv-backend", "kubernetes", "--nnodes", "2", "--rdzv-id", "j")
    error = refused(make, *argv, slug="kube-no-cluster")
    assert "KUBECONFIG" in error.next_step
    (tmp_path / "config").write_text(KUBECONFIG)
    found = make(*argv, KUBECONFIG=str(tmp_path / "config"))
    assert (found.rendezvous.backend, found.rendezvous.store) == ("kubernetes", "own")
    assert (found.spec.timing.lease_ttl_s, found.spec.timing.lease_renew_s) == (3, 1)
    conf = ("--rdzv-conf", f"kubeconfig={tmp_path / 'config'},lease_renew=3")
    found = make(*argv, *conf, "--rdzv-endpoint", "other")
    assert found.rendezvous.store == "other"
    assert found.rendezvous.store_conf == {"kubeconfig": str(tmp_path / "config")}
    assert found.spec.timing.lease_ttl_s == 6
    named = ("--rdzv-conf", f"kubeconfig={tmp_path / 'config'},namespace=third")
    assert make(*argv, *named).rendezvous.store == "third"


def test_keys_of_another_store_are_refused(make):
    error = refused(make, "--rdzv-conf", "context=c", slug="bad-rdzv-conf")
    assert "kubernetes" in error.expected
    conf = ("--rdzv-conf", "user=u,password=p")
    error = refused(make, "--rdzv-backend", "kubernetes", *conf, slug="bad-rdzv-conf")
    assert "etcd" in error.expected


def test_an_unknown_backend_gets_the_nearest_name(make):
    error = refused(make, "--rdzv-backend", "elastan", slug="bad-option-value", error=UsageError)
    assert "elastane" in error.expected


def test_port_0_is_refused_for_jobs_of_several_nodes(make):
    refused(make, "--nnodes", "2", "--rdzv-endpoint", "host:0", slug="endpoint-syntax")


# What the job is called


def test_jobs_of_one_node_never_share_a_name(make):
    assert make().spec.job != make().spec.job
    assert make().spec.job.startswith("train-")


def test_nodes_of_one_job_find_the_same_name_and_other_jobs_another(script):
    def job(*argv, tail=(), **environ):
        argv = ("--nnodes", "2", "--rdzv-endpoint", "h", *argv, script, *tail)
        return build(parse(argv, environ), environ).spec.job

    name = job()
    assert name == job("--node-id", "b", "--nproc-per-node", "4", "--role", "x")
    others = {
        job(tail=("--lr", "1")),
        job("--rdzv-endpoint", "h:1"),
        job("--nnodes", "1:2"),
        job("-m"),
    }
    assert name not in others
    assert len(others) == 4


def test_a_given_name_is_used_and_must_fit_into_a_path(make):
    assert make("--rdzv-endpoint", "h", "--nnodes", "2", "--rdzv-id", "exp 7").spec.job == "exp 7"
    for name in ("a/b", "..", "x" * 300, "tab\t"):
        argv = ("--rdzv-endpoint", "h", "--nnodes", "2", "--rdzv-id", name)
        refused(make, *argv, slug="bad-name", error=ConfigurationError)


def test_several_nodes_in_a_folder_need_a_name(make):
    argv = ("--rdzv-backend", "file", "--nnodes", "2", "--rdzv-endpoint", "shared")
    refused(make, *argv, slug="rdzv-id-missing")


# Secrets


def test_a_job_of_one_machine_makes_its_own_secret(make):
    assert len(make().rendezvous.token) >= 32
    assert make().rendezvous.token != make().rendezvous.token


def test_the_secret_comes_from_flag_then_variable_and_is_never_shown(make, tmp_path):
    far = ("--nnodes", "2", "--rdzv-endpoint", "h")
    (tmp_path / "token").write_text("from file\n")
    assert make(*far, "--token-file", "token", ELASTANE_TOKEN="v").rendezvous.token == "from file"
    assert make(*far, "--rdzv-conf", "token=c", ELASTANE_TOKEN="v").rendezvous.token == "c"
    config = make(*far, ELASTANE_TOKEN="hush")
    assert config.rendezvous.token == "hush"
    assert "hush" not in repr(config)


def test_a_job_without_a_secret_gets_a_note(make):
    far = ("--nnodes", "2", "--rdzv-endpoint", "h")
    assert any("no secret" in note for note in make(*far).notes)
    assert not any("no secret" in note for note in make(*far, ELASTANE_TOKEN="x").notes)


def test_a_token_file_that_cannot_be_used_is_refused(make, tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "huge").write_text("x" * 10_000)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("none", "empty", "huge", "binary"):
        refused(make, "--token-file", name, slug="token-unreadable")
    (tmp_path / "token").write_text("t")
    refused(make, "--token-file", "token", "--rdzv-conf", "token=c", slug="token-unreadable")


def test_tls_needs_all_three_files(make, tmp_path):
    for name in ("c", "k", "a"):
        (tmp_path / name).write_text("")
    argv = ("--tls-cert", "c", "--tls-key", "k")
    refused(make, *argv, slug="tls-files")
    refused(make, *argv, "--tls-ca", "none", slug="tls-files")
    assert make(*argv, "--tls-ca", "a").rendezvous.tls is not None
    found = make("--rdzv-conf", "tls_cert=c,tls_key=k,tls_ca=a", "--tls-ca", "c").rendezvous.tls
    assert (found.cert, found.key, found.ca) == ("c", "k", "c")


# Nodes, workers, durations


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("3", (3, 3)), ("2:5", (2, 5))])
def test_nnodes(text, nodes):
    assert read_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "-1", "3:2", "1:2:3", "x", "", ":2", "1:"])
def test_bad_nnodes(text):
    with pytest.raises(UsageError, match="--nnodes"):
        read_nnodes(text)


def test_nproc_counts_cpus_and_visible_devices():
    assert read_nproc("4", {}) == 4
    assert read_nproc("cpu", {}) == cpu_count()
    assert read_nproc("gpu", {"CUDA_VISIBLE_DEVICES": "0,3"}) == 2
    assert read_nproc("auto", {"CUDA_VISIBLE_DEVICES": ""}) == cpu_count()
    with pytest.raises(ConfigurationError) as caught:
        read_nproc("gpu", {"CUDA_VISIBLE_DEVICES": ""})
    assert caught.value.slug == "no-gpu"
    for text in ("0", "-1", "-", ""):
        with pytest.raises(UsageError):
            read_nproc(text, {})


def test_durations_come_from_flag_variable_and_conf(make):
    timing = make("--drain-timeout", "2.5", "--rdzv-conf", "join_timeout=60").spec.timing
    assert (timing.drain_timeout_s, timing.join_timeout_s) == (2.5, 60)
    assert make(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").spec.timing.shutdown_timeout_s == 7
    both = make("--shutdown-timeout", "0.5", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7")
    assert both.spec.timing.shutdown_timeout_s == 0.5
    refused(make, slug="bad-option-value", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")
    refused(make, "--shutdown-timeout", "-1", slug="bad-timing")
    refused(make, "--drain-timeout", "nan", slug="bad-option-value")


def test_max_restarts_is_not_negative(make):
    assert make("--max-restarts", "3").spec.max_restarts == 3
    refused(make, "--max-restarts", "-1", slug="bad-option-value")


def test_a_node_rank_is_requested_only_when_given(make):
    assert make().node.node_rank is None
    assert make("--node-rank", "0").node.node_rank == 0


# What is run


def test_the_kinds_of_command(make, script):
    assert make().command.kind == "script"
    assert make("-m").command.kind == "module"
    assert make("--run-path").command.kind == "run-path"
    assert make("--run-path", "--no-python").command.kind == "run-path"
    refused(make, "-m", "--no-python", slug="usage")
    config = build(parse(["--no-python", "sh", "-c", "x"], {}), {})
    assert (config.command.kind, config.command.zygote) == ("exec", False)


@pytest.mark.torch
def test_the_zygote_forks_only_its_own_interpreter(make):
    assert make().command.zygote
    assert "torch" in make().command.preload
    assert not make("--no-zygote").command.zygote
    other = make(PYTHON_EXEC="/usr/bin/other-python").command
    assert (other.zygote, other.python) == (False, "/usr/bin/other-python")
    assert make("--preload", "a, b,").command.preload == ("a", "b")


def test_a_script_that_is_not_there_gets_the_nearest_name(script):
    with pytest.raises(UsageError, match=r"trian\.py") as caught:
        build(parse(["trian.py"], {}), {})
    assert "train.py" in caught.value.expected
    for argv in (["no/such/folder.py"], ["--no-python", "no-such-program"]):
        with pytest.raises(UsageError) as caught:
            build(parse(argv, {}), {})
        assert caught.value.slug == "script-not-found" and caught.value.next_step


def test_a_script_that_only_one_worker_could_read_is_refused(script, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "pipe", tmp_path / "folder", "/dev/null"):
        for flags in ([], ["--run-path"]):
            with pytest.raises(UsageError, match=str(target)) as caught:
                build(parse([*flags, str(target)], {}), {})
            assert caught.value.slug == "script-not-a-file" and caught.value.next_step
    (tmp_path / "folder" / "__main__.py").touch()
    build(parse([str(tmp_path / "folder")], {}), {})


def test_a_script_that_this_user_may_not_read_is_refused(script, monkeypatch):
    def is_denied(path, *_, **__):
        raise PermissionError(13, "Permission denied")

    # Root may read all, so the answers of the system are put in their place.
    for target, name, answer in ((os, "access", lambda *_: False), (Path, "stat", is_denied)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, answer)
            with pytest.raises(UsageError, match=r"train\.py: this user may not read it") as caught:
                build(parse(["train.py"], {}), {})
            assert caught.value.next_step.startswith("chmod a+r train.py")


def test_a_file_of_the_users_that_hides_the_package_is_refused(script, tmp_path):
    def refusal(argv, environ=None):
        with pytest.raises(UsageError) as caught:
            build(parse(argv, {}), environ or {})
        assert caught.value.slug == "package-hidden", caught.value
        return caught.value

    own = tmp_path / "elastane.py"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").touch()
    own.write_text("import elastane; elastane.init()")
    error = refusal(["elastane.py"])
    assert str(own) in error.what and error.next_step == f"mv {own} {tmp_path}/my_elastane.py"
    # The zygote and modules start in the current folder.
    for argv in (["train.py"], ["-m", "train"], ["--run-path", "train.py"], ["deep/train.py"]):
        refusal(argv)
    build(parse(["train.py"], {}), {"PYTHONSAFEPATH": "1"})
    build(parse(["--no-python", "sh"], {}), {})
    own.rename(tmp_path / "deep" / "elastane.py")
    build(parse(["train.py"], {}), {})
    refusal(["deep/train.py"])
    (tmp_path / "link.py").symlink_to("deep/train.py")
    refusal(["link.py"])


def test_a_folder_of_logs_or_a_clone_named_elastane_hides_nothing(script, tmp_path):
    (tmp_path / "elastane").mkdir()
    build(parse(["train.py"], {}), {})
    (tmp_path / "elastane" / "__init__.py").touch()
    with pytest.raises(UsageError, match="hides the package elastane"):
        build(parse(["train.py"], {}), {})
    shutil.rmtree(tmp_path / "elastane")
    (tmp_path / "elastane").symlink_to(Path(elastane.__file__).parent)
    build(parse(["train.py"], {}), {})


# Output and signals


def test_output_is_planned_for_each_local_rank(make):
    logs = make("--nproc-per-node", "13", "-r", "3", "--tee", "0:1,12:2").logs
    assert logs.redirects[5] == 3
    assert [logs.tee[rank] for rank in (0, 1, 12)] == [1, 0, 2]
    assert make("--local-ranks-filter", "0,2").logs.console_ranks == {0, 2}
    assert not make().logs.console_ranks
    for text in ("4", "x", "0:4", "0:1:2", ":1"):
        error = refused(make, "-t", text, slug="std-streams")
        assert "--tee" in error.what
    refused(make, "--local-ranks-filter", "0,a", slug="rank-list")


def test_logs_go_to_log_dir_or_to_a_folder_of_the_user(make):
    # Absolute, for a worker may change its folder before it writes there.
    assert make("--log-dir", "out").logs.base_dir == str(Path("out").absolute())
    assert make("--log-dir", "/dev/null").logs.has_files is False
    assert make().logs.has_files
    assert make(TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}:").logs.prefix == "${rank}:"


def test_signals_are_names_that_can_be_handled(make):
    assert "SIGUSR1" in make().signals
    assert make("--signals-to-handle", "SIGUSR2, SIGTERM,SIGUSR2").signals == ("SIGUSR2", "SIGTERM")
    for text in ("SIGKILL", "TERM", "SIGNOPE", "SIG_BLOCK"):
        refused(make, "--signals-to-handle", text, slug="bad-option-value")


# What the user should be told


def test_a_flag_without_effect_gets_a_note(make):
    notes = make("--monitor-interval", "5", "--start-method", "fork").notes
    assert [note for note in notes if "--monitor-interval" in note]
    assert [note for note in notes if "--start-method" in note]
    assert not make("--run-path", "--start-method", "fork").notes
    assert not make().notes


MEETING = ("--rdzv-backend", "elastane", "--rdzv-endpoint", "host:29400")


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (["--nproc-per-node", "4"], True),
        (["--nnodes", "2", *MEETING], True),
        (["--nproc-per-node", "4", "--min-workers", "1"], False),
        (["--nnodes", "1:2", *MEETING], False),
        ([], False),
    ],
)
def test_a_job_in_place_that_can_miss_no_worker_says_so(make, options, is_told):
    notes = make("--in-place", *options).notes
    assert any("--min-workers 1 lets the others" in note for note in notes) is is_told
    assert not any("--min-workers" in note for note in make(*options).notes)


def test_the_thread_default_is_noted_once_where_it_applies(make):
    assert len([n for n in make("--nproc-per-node", "2").notes if "OMP_NUM_THREADS" in n]) == 1
    assert not make("--nproc-per-node", "2", OMP_NUM_THREADS="3").notes


def test_a_health_check_is_a_program_that_is_there_and_has_a_limit(make):
    assert make().supervision.health_check == ()
    made = make("--health-check", "sh -c 'exit 3'", "--health-check-timeout", "1.5").supervision
    assert made.health_check == ("sh", "-c", "exit 3") and made.health_check_s == 1.5
    for words in ("/no/such/check --all", "sh -c 'open", " "):
        refused(make, "--health-check", words, slug="bad-option-value", error=UsageError)
    for limit in ("0", "-1", "soon"):
        refused(make, "--health-check-timeout", limit, slug="bad-option-value", error=UsageError)
