"""Hostile chat templates: small sources whose rendering would take hours, gigabytes, or the stack.

Each is a way to make a value that is larger than its source, and an operation whose cost grows with that value."""

from __future__ import annotations

from itertools import product

# Values that double in each of 60 passes: an operation on all that is inside them never ends.
_DOUBLED = (
    "{%% set ns = namespace(v=%s) %%}{%% for i in range(60) %%}{%% set ns.v = %s %%}{%% endfor %%}{%% set v = ns.v %%}"
)
NESTED = {
    "tuple": _DOUBLED % ("(1,)", "(ns.v, ns.v)"),
    "list": _DOUBLED % ("[1]", "[ns.v, ns.v]"),
    "dict": _DOUBLED % ("{}", "{'a': ns.v, 'b': ns.v}"),
    "items": _DOUBLED % ("(1,)", "({'a': ns.v}.items(), ns.v)"),
    "namespace": _DOUBLED % ("(1,)", "namespace(a=ns.v, b=ns.v)"),
}
NESTED_OPERATIONS = {
    "print": "{{ v }}",
    "concat": "{{ 'a' ~ v }}",
    "string": "{{ v | string | length }}",
    "upper": "{{ v | upper | length }}",
    "lower": "{{ v | lower | length }}",
    "trim": "{{ v | trim | length }}",
    "title": "{{ v | title | length }}",
    "capitalize": "{{ v | capitalize | length }}",
    "replace": "{{ v | replace('a', 'b') | length }}",
    "replace-with": "{{ 'aaa' | replace('a', v) | length }}",
    "replace-method": "{{ 'aaa'.replace(v, 'a') }}",
    "split-method": "{{ 'aaa'.split(v) }}",
    "join-method": "{{ 'aaa'.join([v]) }}",
    "join": "{{ [v, v] | join | length }}",
    "join-by": "{{ 'ab' | join(v) | length }}",
    "is-lower": "{{ v is lower }}",
    "raise": "{{ raise_exception(v) }}",
    "set-block": "{% set s %}{{ v }}{% endset %}",
    "filter-block": "{% filter upper %}{{ v }}{% endfilter %}",
    "autoescape": "{% autoescape true %}{{ v }}{% endautoescape %}",
    "map-string": "{% set s = [v] | map('string') | list %}",
    "select-lower": "{% set s = [v] | select('lower') | list %}",
    "attribute-name": "{{ {}[v] }}",
}
HASHED_OPERATIONS = {  # of tuples: lists and dicts cannot be hashed
    "get": "{{ {}.get(v) }}",
    "get-default": "{{ {}.get(v, 1) }}",
    "getitem": "{{ {1: 2}[v] }}",
    "in-dict": "{{ v in {1: 2} }}",
    "not-in-dict": "{{ v not in {1: 2} }}",
    "in-list-of-dict": "{{ 1 in {v: 2} }}",
    "dict-key": "{% set d = {v: 1} %}",
    "dict-call": "{% set d = dict([(v, 1)]) %}",
    "namespace-call": "{% set d = namespace([(v, 1)]) %}",
    "unique": "{% set d = [v] | unique | list %}",
    "is-filter": "{{ v is filter }}",
    "is-test": "{{ v is test }}",
    "is-in": "{{ v is in({1: 2}) }}",
    "select-in": "{% set d = [v] | select('in', {1: 2}) | list %}",
    "reject-in": "{% set d = [v] | reject('in', {1: 2}) | list %}",
    "map-attribute": "{% set d = [{}] | map(attribute=v) | list %}",
    "selectattr": "{% set d = [{}] | selectattr(v) | list %}",
    "rejectattr": "{% set d = [{}] | rejectattr(v) | list %}",
    "sort-attribute": "{% set d = [{}, {}] | sort(attribute=v) %}",
    "join-attribute": "{{ [{}] | join(attribute=v) }}",
    "unique-attribute": "{% set d = [{}] | unique(attribute=v) | list %}",
    "max-attribute": "{{ [{}, {}] | max(attribute=v) }}",
    "difference": "{{ {'a': v}.items() - {'a': v}.items() }}",
    "keys-difference": "{{ {1: 1}.keys() - [v] }}",
}
# Two values that are equal, but not identical: comparing them never ends.
_PAIR = (
    "{% set ns = namespace(a=(1,), b=(1,)) %}"
    "{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
    "{% set a = ns.a %}{% set b = ns.b %}"
)
COMPARISONS = {
    "equal": "{{ a == b }}",
    "unequal": "{{ a != b }}",
    "less": "{{ a < b }}",
    "greater-equal": "{{ a >= b }}",
    "chained": "{{ 0 == 0 != a == b }}",
    "in-list": "{{ a in [b] }}",
    "not-in-list": "{{ a not in [b] }}",
    "count": "{{ [a].count(b) }}",
    "index": "{{ [a].index(b) }}",
    "tuple-count": "{{ (a, a).count(b) }}",
    "tuple-index": "{{ (1, a).index(b) }}",
    "is-eq": "{{ a is eq(b) }}",
    "is-ne": "{{ a is ne(b) }}",
    "is-lt": "{{ a is lt(b) }}",
    "is-in": "{{ a is in([b]) }}",
    "select-eq": "{{ [a] | select('eq', b) | list | length }}",
    "selectattr-eq": "{{ [{'x': a}] | selectattr('x', 'eq', b) | list | length }}",
    "rejectattr-ge": "{{ [{'x': a}] | rejectattr('x', 'ge', b) | list | length }}",
    "sort": "{% set s = [a, b, a, b] | sort %}",
    "dictsort": "{% set s = {1: a, 2: b} | dictsort(by='value') %}",
    "max": "{{ [a, b] | max }}",
    "min": "{{ [a, b] | min }}",
    "dicts": "{{ {'x': a} == {'x': b} }}",
    "items": "{{ {'x': a}.items() == {'x': b}.items() }}",
    "changed": "{% for i in [1, 2] %}{{ loop.changed(a if i == 1 else b) }}{% endfor %}",
    "macro-default": "{% macro m(x=a) %}{{ x == b }}{% endmacro %}{{ m() }}",
}
# A text of millions of characters, in a loop.
TEXT_LOOP = "{{% set s = 'ab' * 1000000 %}}{{% for i in range(99999) %}}{}{{% endfor %}}"
TEXT_OPERATIONS = {
    "upper": "{% set x = s.upper() %}",
    "upper-filter": "{% set x = s | upper %}",
    "swapcase": "{% set x = s.swapcase() %}",
    "casefold": "{% set x = s.casefold() %}",
    "title": "{% set x = s | title %}",
    "strip": "{% set x = s.strip('ab') %}",
    "split": "{% set x = s.split('a') %}",
    "split-words": "{% set x = s.split() %}",
    "rsplit": "{% set x = s.rsplit('b') %}",
    "splitlines": "{% set x = s.splitlines() %}",
    "partition": "{% set x = s.rpartition('c') %}",
    "find": "{% set x = s.find('c') %}",
    "replace": "{% set x = s.replace('a', 'c') %}",
    "replace-empty": "{% set x = s | replace('', 'xyz') %}",
    "endswith": "{% set x = s.endswith(s) %}",
    "isalpha": "{% set x = s.isalpha() %}",
    "list": "{% set x = s | list %}",
    "reverse": "{% set x = s | reverse %}",
    "unique": "{% set x = s | unique | list %}",
    "sort": "{% set x = s | sort %}",
    "map": "{% set x = s | map('upper') | list %}",
    "select": "{% set x = s | select('eq', 'c') | list %}",
    "int": "{% set x = s | int %}",
    "tojson": "{% set x = s | tojson %}",
    "concat": "{% set x = s ~ s %}",
    "plus": "{% set x = s + s %}",
    "times": "{% set x = s * 2 %}",
    "slice": "{% set x = s[1:] %}",
    "compare": "{% if s == s[1:] %}{% endif %}",
    "print": "{{ s }}",
    "loop": "{% for c in s %}{% endfor %}",
    "macro": "{% macro m(x) %}{{ x }}{% endmacro %}{{ m(s) }}",
    "strftime": "{% set x = strftime_now(s) %}",
    "dict-items": "{% set d = dict(a=s) %}{% set x = d.items() | list | string %}",
}
OTHERS = {
    "rfind": "{% set s = 'a' * 4000000 %}{{ s.rfind('b' + 'a' * 2000000) }}",
    "rindex": "{% set s = 'a' * 4000000 %}{{ s.rindex('b' + 'a' * 2000000) }}",
    "rsplit": "{% set s = 'a' * 4000000 %}{{ s.rsplit('b' + 'a' * 2000000) | length }}",
    "rpartition": "{% set s = 'a' * 4000000 %}{{ s.rpartition('b' + 'a' * 2000000) | length }}",
    "strip-many": "{% set s = 'a' * 4000000 %}{{ s.strip('b' * 2000000 + 'a') | length }}",
    "trim-many": "{% set s = 'a' * 4000000 %}{{ s | trim('b' * 2000000 + 'a') | length }}",
    "deep-tuple": "{% set ns = namespace(v=1) %}{% for a in range(400) %}{% for b in range(300) %}"
    "{% set ns.v = (ns.v,) %}{% endfor %}{% endfor %}{{ {}.get(ns.v) }}",
    "deep-print": "{% set ns = namespace(v=1) %}{% for a in range(400) %}{% for b in range(300) %}"
    "{% set ns.v = [ns.v] %}{% endfor %}{% endfor %}{{ ns.v }}",
    "own-namespace": "{% set ns = namespace() %}{% set ns.v = (ns, ns) %}{{ ns }}",
    "mutual-macros": "{% macro a() %}{{ b() }}{{ b() }}{% endmacro %}"
    "{% macro b() %}{{ a() }}{{ a() }}{% endmacro %}{{ a() }}",
    "caller": "{% macro m(n) %}{{ caller() }}{% if n %}{% call m(n - 1) %}{{ caller() }}{% endcall %}{% endif %}"
    "{% endmacro %}{% call m(99) %}x{% endcall %}",
    "blocks": "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{% endblock %}",
    "format-method": "{{ '{:>999999999}'.format(1) }}",
    "format-map": "{{ '{x:>999999999}'.format_map({'x': 1}) }}",
    "format-filter": "{{ '%999999999d' | format(1) }}",
    "percent-star": "{{ '%*d' % (999999999, 1) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "encode": "{{ ('a' * 999999).encode('utf-16') }}",
    "translate": "{{ 'aaaa'.translate({97: 'b' * 999999}) }}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1) }}",
    "urlize": "{{ ('http://a.b ' * 99999) | urlize }}",
    "truncate": "{{ ('a ' * 999999) | truncate(10) }}",
    "striptags": "{{ ('<' * 99999) | striptags }}",
    "regex": "{{ ('a' * 99) | regex_replace('(a+)+$', '') }}",
    "batch": "{{ range(99999) | batch(999999999, 1) | list }}",
    "slice-filter": "{{ [1] | slice(99999999) | list }}",
    "sum-lists": "{{ ([[1]] * 999999) | sum(start=[]) }}",
    "groupby": "{{ ([{}] * 999999) | groupby('a') }}",
    "pprint": "{{ ([[1]] * 999999) | pprint }}",
    "xmlattr": "{{ {'a': 'b' * 99999999} | xmlattr }}",
    "random": "{{ range(99999999) | random }}",
    "cycler": "{{ cycler(1, 2) }}{{ 'a' * 999999999 }}",
    "joiner": "{{ joiner('a' * 999999999)() }}",
    "huge-int-text": "{{ ('9' * 4000000) | int + [1] }}",
    "huge-literal": "{{ " + "9" * 100_000 + " }}",
    "shift": "{{ 2 ** 99999999 }}",
    "multiply": "{% set ns = namespace(x=3) %}{% for i in range(99999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "subtract": "{{ [1] - [2] }}",
    "range-list": "{{ range(99999) | list | length }}" * 4000,
    "nested-ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "loop-filter": "{% for a in range(99999) if a in range(99999) | list %}{% endfor %}",
    "loop-index": "{% for a in range(99999) %}{% for b in messages * 99999 %}{{ loop.revindex }}"
    "{% endfor %}{% endfor %}",
    "huge-exception": "{{ raise_exception('x' * 20000000) }}",
    "huge-missing-name": "{{ {}['x' * 20000000].y }}",
    "huge-undefined": "{{ messages[0]['x' * 20000000] + 1 }}",
    "indent-text": "{{ ('\n' * 99999) | indent('x' * 99999) }}",
    "indent-negative": "{{ ('\n' * 99999) | indent(99999999) }}",
    "tojson-separators": "{{ ([1] * 9999) | tojson(separators=('x' * 99999, ':')) }}",
    "tojson-indent": "{{ [1] | tojson(indent='x' * 999999999) }}",
    "elif-chain": "{% if a %}{% set v0 = 1 %}"
    + "".join(f"{{% elif a %}}{{% set v{i} = 1 %}}" for i in range(800))
    + "{% endif %}{{ 1 // 0 }}",
    "many-macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(800)) + "{{ 1 // 0 }}",
    "deep-filters": "{{ 1" + " | string" * 20_000 + " }}",
    "deep-calls": "{{ " + "dict(a=" * 3000 + "1" + ")" * 3000 + " }}",
    "deep-lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep-conditions": "{{ " + "1 if " * 5000 + "1" + " else 1" * 5000 + " }}",
    "many-comparisons": "{{ 1" + " < 2" * 40_000 + " }}{{ 1 // 0 }}",
    "many-names": "{{ " + " ~ ".join(f"n{i}" for i in range(20_000)) + " }}{{ 1 // 0 }}",
}


def build_hostile_templates() -> dict[str, str]:
    """Return the sources by name."""
    found = {f"{kind}-{name}": NESTED[kind] + text for kind, (name, text) in product(NESTED, NESTED_OPERATIONS.items())}
    found |= {f"hash-{name}": NESTED["tuple"] + text for name, text in HASHED_OPERATIONS.items()}
    found |= {f"compare-{name}": _PAIR + text for name, text in COMPARISONS.items()}
    found |= {f"text-{name}": TEXT_LOOP.format(text) for name, text in TEXT_OPERATIONS.items()}
    return found | OTHERS
