import pytest
import re2

from holdfast.diagnose.classes import MEANINGS, Class
from holdfast.diagnose.rules import RULES
from holdfast.diagnose.rules.deciding import DECIDING
from holdfast.diagnose.rules.row import Role, Rule, Sureness

ROWS = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@ROWS
def test_rule_recognises_the_lines_it_quotes(rule: Rule):
    assert bool(rule.lines) == bool(rule.pattern)
    for line in rule.lines:
        assert re2.search(rule.pattern, line), line


@ROWS
def test_rule_names_facts_and_classes_that_fit_its_role(rule: Rule):
    assert not set(rule.decides) - set(DECIDING)
    if rule.role is Role.PRIMARY:
        assert rule.classes
        assert rule.remedy or rule.sure is Sureness.UNSURE
        assert rule.decides or rule.sure is Sureness.CERTAIN
    else:
        assert rule.sure is Sureness.UNSURE
    assert Class.UNKNOWN not in rule.classes


def test_every_class_has_words():
    assert set(MEANINGS) == set(Class)
