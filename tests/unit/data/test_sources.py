"""Files and tasks: what is wrong with them is said with file, row, column and fix, before the first step."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.sources import open_source
from megarl.errors import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": [{"role": "user", "content": "1+2="}], "answer": "3", "level": 2},
]


def _jsonl(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def _open(path, **options):
    return open_source({"kind": "file", "path": str(path), **options})


def test_jsonl_rows_keep_further_columns_as_metadata(tmp_path):
    source = _open(_jsonl(tmp_path, *ROWS, "\n"), answer_column="answer")
    assert len(source) == 2 and source.name == "data"
    row = source.row(1)
    assert row.prompt == ROWS[1]["prompt"] and row.answer == "3" and row.metadata == {"level": 2}
    assert row.where.endswith("data.jsonl:2")
    assert source.row(0) == source.row(0)


def test_parquet_rows_are_the_same(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[0]]), path)
    row = _open(path, answer_column="answer", name="math").row(0)
    assert (row.prompt, row.answer, row.metadata) == ("1+1=", "2", {"level": 1})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[1]]), path)
    assert _open(path).row(0).prompt == ROWS[1]["prompt"]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ((), {}, "the dataset is empty"),
        (("\n",), {}, "the dataset is empty"),
        (
            ({"question": "a"},),
            {},
            r"column 'prompt' is missing; there are \['question'\] .*jsonl:1.*set prompt_column",
        ),
        ((ROWS[0], {"prompt": "a"}), {"answer_column": "answer"}, r"'answer' is missing.*jsonl:2.*set answer_column"),
        ((ROWS[0], '{"prompt": '), {}, r"not a JSON object.*jsonl:2"),
        (("[1]\n",), {}, "expected a JSON object, found list"),
        (({"prompt": 5},), {}, "must hold text or a list of {role, content} messages, found 5"),
        (({"prompt": [{"role": "user"}]},), {}, "must hold text or a list"),
        (({"prompt": []},), {}, "must hold text or a list"),
        (({"prompt": "a", "answer": None},), {"answer_column": "answer"}, "must hold an answer, found None"),
    ],
)
def test_a_broken_file_is_refused_when_it_is_opened(tmp_path, lines, options, message):
    with pytest.raises(DataError, match=message):
        _open(_jsonl(tmp_path, *lines), **options)


def test_unreadable_files_are_data_errors(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        _open(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="Is a directory"):
        (tmp_path / "dir.jsonl").mkdir()
        _open(tmp_path / "dir.jsonl")
    with pytest.raises(DataError, match=r"kind '.csv'.*use .jsonl or .parquet"):
        _open(tmp_path / "data.csv")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl:1"):
        _open(tmp_path / "latin.jsonl")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        _open(tmp_path / "torn.parquet")


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"question": "a"}], {}, r"'prompt' is missing; there are \['question'\]"),
        ([{"prompt": 1}], {}, "must hold text or a list .* found int64"),
        ([{"prompt": ["a"]}], {}, "must hold text or a list"),
        ([{"prompt": "a"}, {"prompt": None}], {}, "found 1 rows without one"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": None}], {"answer_column": "answer"}, "'answer'"),
    ],
)
def test_a_wrong_parquet_column_is_refused(tmp_path, rows, options, message):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match=message):
        _open(path, **options)


def test_the_fingerprint_changes_with_rows_and_columns(tmp_path):
    first = _open(_jsonl(tmp_path, *ROWS)).fingerprint()
    assert first == _open(_jsonl(tmp_path, *ROWS)).fingerprint()
    assert first != _open(_jsonl(tmp_path, *reversed(ROWS))).fingerprint()
    assert first != _open(_jsonl(tmp_path, *ROWS), answer_column="answer").fingerprint()


def _gym(**options):
    return open_source({"kind": "reasoning_gym", "size": 5, **options})


def test_gym_items_depend_on_the_seed_alone():
    one, same, other = _gym(task="chain_sum"), _gym(task="chain_sum"), _gym(task="chain_sum", seed=1)
    assert [one.row(i) for i in range(5)] == [same.row(i) for i in (0, 1, 2, 3, 4)]
    assert one.row(0) != other.row(0)
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert one.row(3).metadata["entry"]["answer"] == one.row(3).answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum"),
        ({"task": "zzzz"}, "one of: "),
        ({"task": "chain_sum", "options": {"min_term": 2}}, "refuses the options"),
        ({"task": "chain_sum", "options": {"min_terms": -1}}, "refuses the options"),
        ({"task": "chain_sum", "options": {"seed": 3}}, "set them beside options"),
    ],
)
def test_a_wrong_task_or_option_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        _gym(**options)


def test_a_source_of_no_known_kind_is_refused():
    with pytest.raises(DataError, match="file or reasoning_gym"):
        open_source({"kind": "csv"})
