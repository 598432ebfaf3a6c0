"""What a waiting worker imports early calls nothing of the script."""

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from elastane.worker.world import warm_up


def test_no_hook_of_the_script_is_called():
    calls = []
    pre = register_optimizer_step_pre_hook(lambda *_: calls.append("pre"))
    post = register_optimizer_step_post_hook(lambda *_: calls.append("post"))
    try:
        warm_up()
    finally:
        pre.remove()
        post.remove()
    assert calls == []
