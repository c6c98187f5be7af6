"""A terminal that is just enough of one to see what a person would: text, line ends, and moves of the cursor."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\033\[([?0-9;]*)([A-Za-z])|[\r\n]|[^\033\r\n]+|\033")


class Emulator:
    """Rows without end, `columns` wide. What it does not know is an error, as it would be rubbish on a real screen."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rows: list[list[str]] = [[]]
        self._row = self.column = 0
        self._open = ""
        self.wraps = True

    def feed(self, text: str) -> None:
        text = self._open + text
        cut = re.search(r"\033(?:\[[?0-9;]*)?$", text)
        self._open = cut[0] if cut else ""
        for token in _TOKEN.finditer(text, 0, cut.start() if cut else len(text)):
            if token[2]:
                self._control(token[1], token[2])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self._down()
            else:
                assert token[0].isprintable(), token[0]
                for letter in token[0]:
                    self._put(letter)

    def text(self) -> list[str]:
        """What is to be seen, without empty lines."""
        lines = ["".join(row).rstrip() for row in self._rows]
        return [line for line in lines if line]

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])

    def _put(self, letter: str) -> None:
        if self.column == self._columns:
            if self.wraps:
                self.column = 0
                self._down()
            else:
                self.column -= 1
        row = self._rows[self._row]
        row.extend(" " * (self.column + 1 - len(row)))
        row[self.column] = letter
        self.column += 1

    def _control(self, arguments: str, final: str) -> None:
        if final == "m":
            return
        if final == "A":
            self._row -= int(arguments or 1)
            assert self._row >= 0
        elif final == "J" and not arguments:
            del self._rows[self._row + 1 :]
            del self._rows[self._row][self.column :]
        elif arguments == "?7" and final in "hl":
            self.wraps = final == "h"
        else:
            message = f"an unknown sequence: {arguments!r} {final!r}"
            raise AssertionError(message)
