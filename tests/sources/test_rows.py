from flatout.sources.fields import Fields
from flatout.sources.rows import read_rows


def test_rows_that_begin_in_a_range_are_read_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "one"}\n', b"\n", b'{"text": "two"}\n', b'{"text": "three"}']
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    for cut in range(size + 1):
        found = [*read_rows(str(path), 0, cut, Fields()), *read_rows(str(path), cut, size, Fields())]
        assert [row.text for row in found] == ["one", "two", "three"], cut
    assert [row.where() for row in read_rows(str(path), 17, size, Fields())] == [f"{path}, line 3", f"{path}, line 4"]


def test_nested_fields_and_prompts_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": {"q": "ask", "text": "answer"}}\n')
    (row,) = read_rows(str(path), 0, 100, Fields("a.text", "a.q"))
    assert (row.prompt, row.text) == ("ask", "answer")
