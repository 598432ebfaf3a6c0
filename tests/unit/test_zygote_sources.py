"""Variables that a script sets before it imports torch, found in its source."""

import pytest

from elastane.process.zygote.server import sets_too_late

ENV = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'", "OMP_NUM_THREADS"),
        ("os.environ['OMP_NUM_THREADS'] = str(4)", "OMP_NUM_THREADS"),
        ("environ['PYTORCH_JIT'] = '0'", "PYTORCH_JIT"),
        ("os.environ.setdefault('TORCHDYNAMO_DISABLE', '1')", "TORCHDYNAMO_DISABLE"),
        ("os.environ.update({'MKL_NUM_THREADS': '2'})", "MKL_NUM_THREADS"),
        ("os.environ.update(MKL_NUM_THREADS='2')", "MKL_NUM_THREADS"),
        ("os.environ |= {'MKL_NUM_THREADS': '2'}", "MKL_NUM_THREADS"),
        ("os.putenv('KMP_AFFINITY', 'none')", "KMP_AFFINITY"),
        ("del os.environ['OMP_NUM_THREADS']", "OMP_NUM_THREADS"),
        ("os.environ.pop('OMP_NUM_THREADS', None)", "OMP_NUM_THREADS"),
        ("try:\n    os.environ['NPY_X'] = '1'\nexcept OSError:\n    pass", "NPY_X"),
        ("if True:\n    os.environ['TORCH_LOGS'] = '+dynamo'", "TORCH_LOGS"),
    ],
)
def test_each_way_to_set_a_variable_is_found(statement, name):
    source = f"import os\nfrom os import environ\n{statement}\nimport torch\n"
    assert name in sets_too_late(source.encode(), ENV)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '4'",
        "from torch import nn\nimport os\nos.environ['OMP_NUM_THREADS'] = '4'",
        "try:\n    import torch.nn\nfinally:\n    pass\nos.environ['OMP_NUM_THREADS'] = '4'",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'  # as it is",
        "import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')",
        "import os\nos.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '1'  # read later",
        "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'",
        "import os\nos.environ[name] = '1'",
        "import os\nos.environ.pop('MKL_NUM_THREADS', None)  # not set",
        "def later():\n    os.environ['OMP_NUM_THREADS'] = '4'",
        "import os\nprint(os.environ['OMP_NUM_THREADS'])",
        "import os\nos.environ[",
        "nothing = 1",
    ],
)
def test_changes_that_torch_does_not_read_are_ignored(source):
    assert sets_too_late(source.encode(), ENV) == ""


def test_bytes_that_are_no_source_have_no_findings():
    assert sets_too_late(b"\xff\xfe environ \x00", ENV) == ""
