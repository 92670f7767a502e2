"""Step 1: the model is cut into fragments. A fragment is sent, merged and adopted as one."""

import numpy as np

from isthmus.format.layout import Spec, TensorClass, partition

SPECS = [Spec("embedding", (100, 8), "float32", TensorClass.EMBEDDING)] + [
    Spec(f"layer{i}", (20, 8), "float32", TensorClass.DENSE) for i in range(40)
]
"""A model of 7,200 parameters: an embedding and forty layers."""


def test_every_parameter_is_in_one_fragment() -> None:
    layout = partition(SPECS, 4)
    assert len(layout.fragments) == 4
    assert sum(fragment.size for fragment in layout.fragments) == 7200


def test_fragments_are_of_about_the_same_size() -> None:
    """So each of them takes about the same time on the network. A large tensor is cut between its rows."""
    sizes = [fragment.size for fragment in partition(SPECS, 4).fragments]
    assert max(sizes) < 1.2 * float(np.mean(sizes))


def test_all_learners_cut_the_model_alike() -> None:
    """`partition` is deterministic. The creator of a run stores its result in the run object, and all others read it."""
    assert partition(SPECS, 4) == partition(list(SPECS), 4)
