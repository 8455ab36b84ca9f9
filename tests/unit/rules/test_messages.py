"""`python -m tests.messages` finds every error message and every notice."""

import inspect
import re

from tests import messages

from megatrain import errors

FOUND = messages.find()


def test_every_error_class_has_a_message():
    classes = {name for name, kind in vars(errors).items() if inspect.isclass(kind)}
    assert classes <= {each.kind for each in FOUND}


def test_nothing_is_skipped():
    """A plain text search of the lines finds nothing that is not on the page."""
    lines = {(each.file, each.line) for each in FOUND}
    starts = re.compile(r"^ *(raise [A-Z]\w+\(|(announce|warn)\()")
    expected = {
        (str(path.relative_to(messages.SOURCE)), number)
        for path in messages.SOURCE.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if starts.match(line)
    }
    assert len(expected) > 200
    assert expected <= lines


def test_the_page():
    page = messages.page(FOUND)
    assert page.startswith("## __init__.py\n")
    for each in FOUND:
        assert f"{each.line}: {each.kind}\n" in page
    assert max(map(len, page.splitlines())) <= 200


def test_fields_constants_and_arguments_are_shown(tmp_path):
    (tmp_path / "one.py").write_text(
        'HELP = "Do this."\n'
        "class Own(ValueError): ...\n"
        "def check(what, size):\n"
        '    why = "small" if size else f"{size:.1f} left"\n'
        '    raise Own(f"{what} is too {why}. {HELP}" + "!")\n'
        'def use():\n    check("the store", 3)\n    announce("done" if ok else text)\n    raise OSError(1, "no disk")\n'
    )
    found = messages.find(tmp_path)
    assert [(each.line, each.kind, each.text) for each in found] == [
        (5, "Own", "{what} is too {why}. {HELP}!"),
        (7, "check(...)", "what = the store"),
        (8, "announce", "<done|{text}>"),
        (9, "OSError", "{1} → no disk"),
    ]
    assert found[0].parts == {"HELP": ["Do this."], "why": ["<small|{size} left>"]}
