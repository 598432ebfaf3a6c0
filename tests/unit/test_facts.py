"""Facts about the host, read without importing torch."""

import subprocess
import sys

import pytest

from elastane.options import facts


def test_versions_are_those_of_the_installed_torch():
    torch = pytest.importorskip("torch")
    found = facts.versions()
    assert found.torch == torch.__version__
    assert found.python == f"{sys.version_info[0]}.{sys.version_info[1]}"
    if torch.version.cuda:
        assert found.accelerator.startswith(f"cuda {torch.version.cuda}")
    else:
        assert found.accelerator == ""


def test_a_build_for_cuda_or_rocm_is_named(tmp_path, monkeypatch):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    text = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    (tmp_path / "version.py").write_text(text)
    assert facts.versions().accelerator.startswith("cuda 13.0")
    assert facts.usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 2
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda = None\nhip = '6.4'\n")
    assert facts.versions().accelerator == "hip 6.4"


def test_versions_do_not_import_torch():
    code = (
        "import sys; from elastane.options.facts import versions; versions();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=90).returncode == 0


def test_an_absent_torch_is_an_empty_version(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert facts.torch_build() == {}
    assert facts.versions().torch == ""
    assert facts.usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("0", 1), ("0,1,2", 3), ("1,-1,2", 1), ("GPU-aa,GPU-bb", 2), ("NoDevFiles,", 1)],
)
def test_gpus_are_counted_as_the_runtime_sees_them(visible, count):
    assert facts.gpu_count({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_without_the_variable_device_files_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert facts.gpu_count({}, tmp_path) == 3
    assert facts.gpu_count({}, tmp_path / "none") == 0
