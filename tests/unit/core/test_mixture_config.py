"""The settings of a mixture: what is refused, in which line, and what belongs to the training."""

import pytest

from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.stages import preflight, resolve

TWO = "{name: web, source: ./web, weight: 3}, {name: code, source: digits, text_field: content}"

PHASE = "{first_step: 4, weights: {web: 1, code: 1}}"


def parsed(mixture, phases="", *overrides):
    return config.parse(f"data: {{mixture: [{mixture}], mixture_phases: [{phases}]}}", overrides)


@pytest.mark.parametrize(
    ("mixture", "phases", "line"),
    [
        ("{name: a, source: x}, {name: a, source: y}", "", "the components of a mixture need different names: a, a"),
        ("{name: a, source: x, weight: 0}", "", "one of the weights of a mixture is above 0"),
        ("{name: a, source: x, weight: 0.3333333333}, {name: b, source: y}", "", "too many digits"),
        ("{name: a, source: x, weight: -1}", "", "greater than or equal to 0"),
        ("{name: 'a/b', source: x}", "", "data.mixture.0.name"),
        ("{name: a}", "", "data.mixture.0.source"),
        ("{name: a, source: x, wieght: 2}", "", "did you mean 'weight'?"),
        (TWO, "{first_step: 4, weights: {web: 1}}", "the phase of step 4 names not the components"),
        (TWO, "{first_step: 4, weights: {web: 0, code: 0}}", "one of the weights of a mixture is above 0"),
        (
            TWO,
            "{first_step: 4, weights: {web: 1, code: 1}}, {first_step: 4, weights: {web: 1, code: 2}}",
            "in the order",
        ),
        (TWO, "{first_step: 0, weights: {web: 1, code: 1}}", "greater than or equal to 1"),
        ("", "{first_step: 4, weights: {web: 1}}", "names not the components"),
    ],
)
def test_a_wrong_mixture_is_refused_in_a_line_that_says_why(mixture, phases, line):
    with pytest.raises(ConfigError) as caught:
        parsed(mixture, phases)
    assert line in caught.value.line


def test_a_source_beside_a_mixture_is_refused():
    with pytest.raises(ConfigError, match="source and mixture exclude each other"):
        parsed(TWO, "", "data.source=digits")


def test_weights_and_phases_belong_to_the_training_and_sources_do_not():
    def digest(*arguments):
        return parsed(*arguments).training_digest("d")

    phase = "{first_step: 4, weights: {web: 1, code: 1}}"
    own = digest(TWO, phase)
    assert digest(TWO.replace("./web", "./elsewhere"), phase) == own
    changed = [
        (TWO.replace("weight: 3", "weight: 2"), phase),
        (TWO.replace("web", "net"), phase.replace("web", "net")),
        (TWO, phase.replace("4", "5")),
        (TWO, phase.replace("code: 1", "code: 2")),
        (TWO, ""),
    ]
    assert len({own, config.parse("").training_digest("d"), *(digest(*each) for each in changed)}) == 7


def test_a_mixture_survives_being_kept_and_sent():
    given = parsed(TWO, "{first_step: 4, weights: {web: 0.25, code: 1}}")
    assert config.parse_kept(given.to_yaml(), "config.yaml") == given
    assert config.parse_kept(given.to_yaml(), "config.yaml").digest() == given.digest()


def test_each_component_is_a_source_of_its_own():
    data = parsed(TWO).data
    web, code = (data.of_component(each) for each in data.mixture)
    assert (web.source, web.text_field, web.mixture) == ("./web", "text", ())
    assert (code.source, code.text_field, code.mixture) == ("digits", "content", ())
    assert data.sources == {"data.mixture[0].source": "./web", "data.mixture[1].source": "digits"}


def test_the_sources_of_a_mixture_are_anchored_and_checked_as_one_is(tmp_path):
    anchored = resolve.anchor_paths(parsed(TWO), tmp_path)
    assert [each.source for each in anchored.data.mixture] == [f"{tmp_path}/web", "digits"]
    with_password = parsed(TWO.replace("./web", "'https://me:secret@host/web'"))
    with pytest.raises(ConfigError, match=r"data\.mixture\[0\]\.source") as caught:
        preflight.check_credentials(with_password)
    assert "secret" not in caught.value.line
    with pytest.raises(LaunchError, match=r"data\.mixture\[0\]\.source: .* cannot reach a file"):
        preflight._require_remote_source(*next(iter(anchored.data.sources.items())), "a pod")
