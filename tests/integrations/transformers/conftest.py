"""heedful is registered with transformers for each test, and gone after it."""

import importlib.util

import pytest
import torch

IS_MISSING = importlib.util.find_spec("transformers") is None
collect_ignore_glob = ["test_*.py"] if IS_MISSING else []


@pytest.fixture(autouse=True)
def registered():
    from heedful.integrations import transformers as plug_in

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not plug_in.is_registered():
        plug_in.register()
    plug_in.reset_paths()
    yield
    torch.set_num_threads(threads)
    if plug_in.is_registered():
        plug_in.unregister()
