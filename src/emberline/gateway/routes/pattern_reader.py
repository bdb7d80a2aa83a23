"""PatternParser: parses a regular expression to a Pattern.

A repeated part is parsed again for each repetition."""

from __future__ import annotations

from emberline.gateway.routes.pattern import Accepts, Part, Pattern, class_of, escaped

LONGEST = 512  # characters of an expression
MOST_ATOMS = 2048  # parsed, including repetitions
DEEPEST = 20


def read_pattern(text: str) -> Pattern:
    """Parse a regular expression. Raises ValueError with what is not supported."""
    return PatternReader(text).read()


class PatternReader:
    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters; at most {LONGEST} are allowed")
        self._made = Pattern()
        self._any_case = text.startswith("(?i)")
        text = text.removeprefix("(?i)")
        self._made.from_start = text.startswith("^")
        text = text.removeprefix("^")
        self._made.to_end = text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1
        self._text = text[:-1] if self._made.to_end else text
        self._at = 0
        self._depth = 0
        self._atoms = 0  # including those parsed again for a repetition
        self._top_choice = False

    def read(self) -> Pattern:
        self._made.whole = self._choice()
        if self._at < len(self._text):
            raise ValueError("a ) has no matching (")
        if (self._made.from_start or self._made.to_end) and self._top_choice:
            raise ValueError("^ or $ beside | is ambiguous: put the alternatives in ( )")
        return self._made

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _take(self) -> str:
        if self._at >= len(self._text):
            raise ValueError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Part:
        found = self._row()
        while self._peek() == "|":
            self._take()
            self._top_choice = self._top_choice or self._depth == 0
            other = self._row()
            found = Part(found.empty or other.empty, found.first | other.first, found.last | other.last)
        return found

    def _row(self) -> Part:
        found = Part(True, 0, 0)
        while self._peek() not in ("", "|", ")"):
            found = self._made.joined(found, self._repeated())
        return found

    def _repeated(self) -> Part:
        begin = self._at
        part = self._atom()
        end = self._at
        minimum, maximum = self._times()
        if (minimum, maximum) == (1, 1):
            return part
        after = self._at
        found = part if minimum else Part(True, part.first, part.last)
        if maximum == 0:
            return Part(True, 0, 0)
        for number in range(1, max(minimum, maximum or minimum or 1)):
            self._at = begin
            part = self._atom()
            assert self._at == end
            found = self._made.joined(found, part if number < minimum else Part(True, part.first, part.last))
        if maximum is None:
            tail = self._made.again(part)  # the last copy may repeat
            found.last |= tail.last
        self._at = after
        return found

    def _times(self) -> tuple[int, int | None]:
        sign = self._peek()
        if sign in ("*", "+", "?"):
            self._take()
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif sign == "{":
            found = self._braces()
        else:
            return 1, 1
        if self._peek() == "?":
            self._take()  # lazy or greedy makes no difference to whether there is a match
        if self._peek() in ("*", "+", "?", "{"):
            raise ValueError("a repetition cannot be repeated")
        return found

    def _braces(self) -> tuple[int, int | None]:
        self._take()
        inside = ""
        while (character := self._take()) != "}":
            inside += character
        low, comma, high = inside.partition(",")
        if not low.isdecimal() or (high and not high.isdecimal()) or len(inside) > 8:
            raise ValueError(f"{{{inside[:20]}}} is not a valid repetition")
        maximum = int(low) if not comma else int(high) if high else None
        if maximum is not None and maximum < int(low):
            raise ValueError(f"{{{inside}}} is not a valid repetition")
        return int(low), maximum

    def _atom(self) -> Part:
        self._atoms += 1
        if self._atoms > MOST_ATOMS:
            raise ValueError(f"with its repetitions expanded it has more than {MOST_ATOMS} parts")
        character = self._take()
        match character:
            case "(":
                return self._group()
            case "[":
                return self._made.one(self._class())
            case ".":
                return self._made.one(lambda c: c != "\n")
            case "\\":
                letter = self._take()
                return self._made.one(class_of(letter) or self._same(escaped(letter)))
            case "*" | "+" | "?" | "{":
                raise ValueError(f"{character} has nothing to repeat")
            case "^" | "$":
                raise ValueError(f"{character} can only be the {'first' if character == '^' else 'last'} character")
        return self._made.one(self._same(character))

    def _group(self) -> Part:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"groups are nested more than {DEEPEST} deep")
        if self._peek() == "?":
            if self._text[self._at : self._at + 2] != "?:":
                raise ValueError("of groups with (? only (?: is supported, and (?i) at the start")
            self._at += 2
        found = self._choice()
        if self._peek() != ")":
            raise ValueError("a ( is not closed")
        self._take()
        self._depth -= 1
        return found

    def _class(self) -> Accepts:
        negative = self._peek() == "^"
        if negative:
            self._take()
        ranges: list[tuple[str, str]] = []
        classes: list[Accepts] = []
        first = True
        while (character := self._take()) != "]" or first:
            first = False
            if character == "\\":
                letter = self._take()
                if (known := class_of(letter)) is not None:
                    classes.append(known)
                    continue
                character = escaped(letter)
            last = character
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._take()
                last = self._take()
                last = escaped(self._take()) if last == "\\" else last
            if last < character:
                raise ValueError(f"[{character}-{last}] is empty")
            ranges.append((character, last))

        def within(c: str) -> bool:
            return any(low <= c <= high for low, high in ranges) or any(known(c) for known in classes)

        if self._any_case:
            return lambda c: (within(c) or within(c.swapcase())) != negative
        return lambda c: within(c) != negative

    def _same(self, character: str) -> Accepts:
        if self._any_case:
            return lambda c: c == character or c.swapcase() == character
        return lambda c: c == character
