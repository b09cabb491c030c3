"""The files that run.py writes beside its report."""

from pathlib import Path

from referee import ending
from referee.records import Document
from referee.report import files, markdown, plot


def write(path: Path, text: str | bytes) -> bool:
    """Whether it could be written; says on stderr how it could not."""
    try:
        note = files.write(path, text)
    except OSError as error:
        ending.say(f"cannot write {path}: {error.strerror}")
        return False
    if note:
        ending.say(note)
    return True


def write_results(
    document: Document, json: Path | None, tables: Path | None, picture: Path | None
) -> bool:
    """Whether every file that was asked for could be written."""
    fine, content = True, document.content()
    if json:
        fine &= write(json, document.json())
    if tables:
        fine &= write(tables, markdown.tables(content))
    if picture and not any(record["runs"] for record in document.records):
        ending.say(f"{picture} is not drawn: nothing was timed")
        return False
    return fine & (not picture or write(picture, plot.draw(content, picture.suffix)))
