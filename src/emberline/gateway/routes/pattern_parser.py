"""PatternParser: parses a regular expression to a Pattern.

A part that is repeated, as in a{3}, is parsed again for each repetition.
"""

from __future__ import annotations

from emberline.gateway.routes.pattern import CharacterTest, Pattern, PatternFragment, character_class, unescape

MAX_PATTERN_CHARS = 512  # characters of an expression
MAX_ATOMS = 2048  # parsed, including repetitions
MAX_GROUP_DEPTH = 20


def parse_pattern(text: str) -> Pattern:
    """Parse a regular expression. Raise ValueError if it contains an unsupported construct."""
    return PatternParser(text).parse()


class PatternParser:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN_CHARS:
            raise ValueError(f"the pattern must have at most {MAX_PATTERN_CHARS} characters, not {len(text)}")
        self._pattern = Pattern()
        self._ignore_case = text.startswith("(?i)")
        text = text.removeprefix("(?i)")
        self._pattern.anchored_at_start = text.startswith("^")
        text = text.removeprefix("^")
        self._pattern.anchored_at_end = text.endswith("$") and (len(text) - len(text[:-1].rstrip("\\"))) % 2 == 1
        self._text = text[:-1] if self._pattern.anchored_at_end else text
        self._position = 0
        self._depth = 0
        self._atoms_read = 0  # including those parsed again for a repetition
        self._has_top_level_choice = False

    def parse(self) -> Pattern:
        self._pattern.whole = self._parse_alternatives()
        if self._position < len(self._text):
            raise ValueError("a ) has no matching (")
        if (self._pattern.anchored_at_start or self._pattern.anchored_at_end) and self._has_top_level_choice:
            raise ValueError("^ or $ beside | is ambiguous: put the alternatives in parentheses")
        return self._pattern

    def _peek_character(self) -> str:
        return self._text[self._position] if self._position < len(self._text) else ""

    def _take_character(self) -> str:
        if self._position >= len(self._text):
            raise ValueError("the pattern ends too early")
        self._position += 1
        return self._text[self._position - 1]

    def _parse_alternatives(self) -> PatternFragment:
        found = self._parse_sequence()
        while self._peek_character() == "|":
            self._take_character()
            self._has_top_level_choice = self._has_top_level_choice or self._depth == 0
            other = self._parse_sequence()
            found = PatternFragment(
                found.can_be_empty or other.can_be_empty,
                found.first_positions | other.first_positions,
                found.last_positions | other.last_positions,
            )
        return found

    def _parse_sequence(self) -> PatternFragment:
        found = PatternFragment(True, 0, 0)
        while self._peek_character() not in ("", "|", ")"):
            found = self._pattern.concatenate(found, self._parse_repetition())
        return found

    def _parse_repetition(self) -> PatternFragment:
        begin = self._position
        part = self._parse_atom()
        end = self._position
        minimum, maximum = self._parse_quantifier()
        if (minimum, maximum) == (1, 1):
            return part
        after = self._position
        found = part if minimum else PatternFragment(True, part.first_positions, part.last_positions)
        if maximum == 0:
            return PatternFragment(True, 0, 0)
        for number in range(1, max(minimum, maximum or minimum or 1)):
            self._position = begin
            part = self._parse_atom()
            assert self._position == end
            found = self._pattern.concatenate(
                found, part if number < minimum else PatternFragment(True, part.first_positions, part.last_positions)
            )
        if maximum is None:
            tail = self._pattern.repeat_fragment(part)  # the last copy may repeat
            found.last_positions |= tail.last_positions
        self._position = after
        return found

    def _parse_quantifier(self) -> tuple[int, int | None]:
        sign = self._peek_character()
        if sign in ("*", "+", "?"):
            self._take_character()
            found: tuple[int, int | None] = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif sign == "{":
            found = self._parse_braces()
        else:
            return 1, 1
        if self._peek_character() == "?":
            self._take_character()  # lazy or greedy makes no difference to whether there is a match
        if self._peek_character() in ("*", "+", "?", "{"):
            raise ValueError("a repetition such as a* cannot be repeated again")
        return found

    def _parse_braces(self) -> tuple[int, int | None]:
        self._take_character()
        inside = ""
        while (character := self._take_character()) != "}":
            inside += character
        low, comma, high = inside.partition(",")
        if not low.isdecimal() or (high and not high.isdecimal()) or len(inside) > 8:
            raise ValueError(f"{{{inside[:20]}}} is not a valid repetition")
        maximum = int(low) if not comma else int(high) if high else None
        if maximum is not None and maximum < int(low):
            raise ValueError(f"{{{inside}}} is not a valid repetition")
        return int(low), maximum

    def _parse_atom(self) -> PatternFragment:
        self._atoms_read += 1
        if self._atoms_read > MAX_ATOMS:
            raise ValueError(f"the pattern has more than {MAX_ATOMS} parts after its repetitions are expanded")
        character = self._take_character()
        match character:
            case "(":
                return self._parse_group()
            case "[":
                return self._pattern.add_position(self._parse_class())
            case ".":
                return self._pattern.add_position(lambda c: c != "\n")
            case "\\":
                letter = self._take_character()
                return self._pattern.add_position(character_class(letter) or self._literal_test(unescape(letter)))
            case "*" | "+" | "?" | "{":
                raise ValueError(f"{character} has nothing to repeat")
            case "^" | "$":
                raise ValueError(f"{character} must be the {'first' if character == '^' else 'last'} character")
        return self._pattern.add_position(self._literal_test(character))

    def _parse_group(self) -> PatternFragment:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise ValueError(f"groups are nested more than {MAX_GROUP_DEPTH} deep")
        if self._peek_character() == "?":
            if self._text[self._position : self._position + 2] != "?:":
                raise ValueError("a group with (? is not supported, except (?: and a leading (?i)")
            self._position += 2
        found = self._parse_alternatives()
        if self._peek_character() != ")":
            raise ValueError("a ( is not closed")
        self._take_character()
        self._depth -= 1
        return found

    def _parse_class(self) -> CharacterTest:
        negative = self._peek_character() == "^"
        if negative:
            self._take_character()
        ranges: list[tuple[str, str]] = []
        classes: list[CharacterTest] = []
        first = True
        while (character := self._take_character()) != "]" or first:
            first = False
            if character == "\\":
                letter = self._take_character()
                if (known := character_class(letter)) is not None:
                    classes.append(known)
                    continue
                character = unescape(letter)
            last = character
            if self._peek_character() == "-" and self._text[self._position + 1 : self._position + 2] not in ("]", ""):
                self._take_character()
                last = self._take_character()
                last = unescape(self._take_character()) if last == "\\" else last
            if last < character:
                raise ValueError(f"the character range [{character}-{last}] is empty")
            ranges.append((character, last))

        def is_in_class(character: str) -> bool:
            in_range = any(low <= character <= high for low, high in ranges)
            return in_range or any(test(character) for test in classes)

        if self._ignore_case:
            return lambda c: (is_in_class(c) or is_in_class(c.swapcase())) != negative
        return lambda c: is_in_class(c) != negative

    def _literal_test(self, character: str) -> CharacterTest:
        if self._ignore_case:
            return lambda c: c == character or c.swapcase() == character
        return lambda c: c == character
