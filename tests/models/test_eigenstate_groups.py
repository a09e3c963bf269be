"""Groups restart at every document, in tensors of fixed shapes.

Letters: as in models/eigenstate.py.
"""

import pytest
import torch

from flatout.models.eigenstate import Groups, group_means, latest_states

LENGTHS = {
    "odd": (5, 1, 2, 9, 3),
    "shorter than a group": (1, 2, 1, 3, 2),
    "one document": (20,),
    "groups end together": (8, 4, 8),
    "one token each": (1,) * 9,
}


def ids_of(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def means_of_one_document(drive, scale):
    """Compute the groups of a single document with a loop.

    The mean of each complete group is available from its last token on.
    """
    known, latest = [], 0 * drive[0]
    for t in range(len(drive)):
        if (t + 1) % scale == 0:
            latest = drive[t + 1 - scale : t + 1].mean(dim=0)
        known.append(latest)
    return torch.stack(known)


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("case", LENGTHS)
def test_a_packed_document_has_the_same_groups_as_alone(case, scale):
    lengths = LENGTHS[case]
    ids = torch.cat((ids_of(lengths), ids_of(lengths[::-1])))
    drive = torch.randn(
        2,
        sum(lengths),
        3,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
        requires_grad=True,
    )
    groups = Groups.of(ids, scale)
    actual = latest_states(group_means(drive, scale, groups), scale, groups)
    expected = torch.stack(
        [
            torch.cat([means_of_one_document(part, scale) for part in row.split(cut)])
            for row, cut in zip(drive, (lengths, lengths[::-1]), strict=True)
        ]
    )
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(
        actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    torch.testing.assert_close(
        *(torch.autograd.grad((each * weights).sum(), drive)[0] for each in (actual, expected))
    )


def test_groups_of_neighbouring_documents_differ():
    groups = Groups.of(torch.tensor([[7, 7, 7, 3, 7, 7, 7, 7]]), 2)
    assert groups.document.tolist() == [[1, 3, 3, 0]], (
        "ids may come again; a document of one token has no group"
    )


def test_a_document_does_not_affect_the_groups_of_another():
    drive = torch.ones(1, 9, 1)
    drive[:, :4] = float("nan")
    groups = Groups.of(ids_of((4, 5)), 2)
    known = latest_states(group_means(drive, 2, groups), 2, groups)[0, :, 0]
    assert known[4:].tolist() == [0, 1, 1, 1, 1]
