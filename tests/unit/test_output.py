"""What is printed is the data, byte for byte."""

from crmctl.cli import output


def test_data_that_looks_like_markup_prints_as_it_is() -> None:
    text = output.table(("name",), [("[/b][bold]x[/]",), (":warning:",), ("[link=http://x]y",)])
    assert text.splitlines() == ["NAME", "[/b][bold]x[/]", ":warning:", "[link=http://x]y"]


def test_a_wide_row_is_never_wrapped_or_cut() -> None:
    wide = "x" * 5_000
    assert output.fields({"payload": wide}) == f"payload  {wide}\n"


def test_cells_stay_on_one_line_and_say_none_yes_and_no() -> None:
    assert [output.cell(value) for value in (None, True, False, 1234567, "a\nb")] == [
        "-",
        "yes",
        "no",
        "1234567",
        "a b",
    ]
