"""Special command lines: other devices, start methods, misspelt variables."""

import pytest

from elastane.errors import ConfigurationError, UsageError
from elastane.options import facts
from elastane.options.build import build, read_nproc
from elastane.options.parser import parse


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    def run(*argv, **environ):
        return build(parse([*argv, "train.py"], environ), environ)

    return run


def test_other_devices_are_counted_by_torch_itself(monkeypatch):
    known = {"npu": 8, "xpu": 0}
    monkeypatch.setattr(facts, "device_count", lambda kind, environ: known.get(kind))
    assert read_nproc("npu", {}) == 8
    with pytest.raises(ConfigurationError, match="--nproc-per-node xpu"):
        read_nproc("xpu", {})
    with pytest.raises(UsageError) as caught:
        read_nproc("gup", {})
    assert "did you mean gpu?" in caught.value.expected


def test_a_start_method_decides_how_run_path_starts(make):
    assert make("--run-path").command.zygote
    assert not make("--run-path", "--start-method", "spawn").command.zygote
    assert make("--run-path", "--start-method", "forkserver").command.zygote
    assert make("--start-method", "spawn").command.zygote, "a script is started as ever"


def test_a_monitor_interval_that_torchrun_refuses_is_refused(make):
    for text in ("0", "-1"):
        with pytest.raises(UsageError, match=f"--monitor-interval = '{text}'"):
            make("--monitor-interval", text)


def test_a_variable_that_was_misspelt_is_noted_with_the_nearest(make):
    (note,) = make(PET_NPROC_PER_NODES="4").notes
    assert "PET_NPROC_PER_NODES" in note
    assert "did you mean PET_NPROC_PER_NODE?" in note
    (note,) = make(PET_NUMA_BINDING="node").notes
    assert "--numa-binding" in note
    assert not make(PET_SHOP="dogs").notes


def test_devices_are_counted_by_torch_in_another_process(tmp_path):
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "print('a plugin greets')\n"
        "def get_device_module(kind):\n"
        "    return {'npu': SimpleNamespace(device_count=lambda: 8)}[kind]\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    assert facts.device_count("npu", environ) == 8
    assert facts.device_count("xpu", environ) is None
    assert facts.device_count("no such kind", environ) is None


@pytest.mark.parametrize(
    ("built_for", "auto", "gpu"),
    [({"hip": "6.4"}, 4, 4), ({"xpu": "2025"}, 2, 0), ({"cuda": "13"}, 0, 0), ({}, 0, 0)],
)
def test_torch_counts_devices_without_device_files(monkeypatch, built_for, auto, gpu):
    monkeypatch.setattr(facts, "torch_build", lambda: built_for)
    monkeypatch.setattr(facts, "device_count", lambda kind, environ: {"cuda": 4, "xpu": 2}[kind])
    none_visible = {"CUDA_VISIBLE_DEVICES": ""}
    assert read_nproc("auto", none_visible) == (auto or facts.cpu_count())
    if gpu:
        assert read_nproc("gpu", none_visible) == gpu
    else:
        with pytest.raises(ConfigurationError):
            read_nproc("gpu", none_visible)
