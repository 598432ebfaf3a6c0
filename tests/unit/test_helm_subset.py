"""The renderer of the charts' tests works like Helm in the subset that it supports."""

import pytest
from helm_subset import UnknownTemplateError, merged, render_text

VALUES = {
    "name": "x",
    "count": 0,
    "list": [],
    "map": {"b": 1, "a": [1, 2]},
    "on": True,
    "off": False,
    "text": 'say "x"',
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a: {{ .Values.name }}", "a: x"),
        ("a: {{ .Values.name | quote }}", 'a: "x"'),
        ("{{ .Values.text | quote }}", '"say \\"x\\""'),
        ("{{ int .Values.count | quote }}", '"0"'),
        ("{{ .Values.count }}{{ .Values.on }}", "0true"),
        ("a\n{{- if .Values.on }}\nb\n{{- end }}\nc", "a\nb\nc"),
        ("a\n{{- if .Values.off }}\nb\n{{- end }}\nc", "a\nc"),
        ("{{ if .Values.list }}yes{{ else }}no{{ end }}", "no"),
        ("{{ with .Values.map }}{{ .b }}{{ $.Values.name }}{{ end }}", "1x"),
        (
            "{{ with .Values.count }}{{ .not.there }}{{ else }}{{ .Values.name }}{{ end }}",
            "x",
        ),
        ("{{ if .Values.off }}{{ if .Values.on }}a{{ else }}b{{ end }}{{ else }}c{{ end }}", "c"),
        ("m:\n  {{- toYaml .Values.map | nindent 2 }}", "m:\n  a:\n  - 1\n  - 2\n  b: 1"),
        ("{{ toYaml .Values.list }}", "[]"),
        ("{{ toYaml .Values.name }}", "x"),
        ('{{ printf "%v:%v" .Values.name .Values.on | quote }}', '"x:true"'),
        ('{{ .Values.list | default "z" }}', "z"),
        ("{{ if or .Values.off .Values.count }}a{{ else }}b{{ end }}", "b"),
        ("{{ if (not .Values.off) }}a{{ end }}", "a"),
        ('{{ if ne .Values.name "x" }}a{{ else }}b{{ end }}', "b"),
        ("a {{- /* why */ -}} b", "ab"),
    ],
)
def test_all_syntax_of_the_charts_is_rendered(template, text):
    assert render_text(template, Values=VALUES) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ .Values.other }}",
        "{{ range .Values.list }}{{ end }}",
        "{{ include `x` . }}",
        "{{ $x := 1 }}",
        "{{ .Values.map }}",
        "{{ upper .Values.name }}",
        "{{ .Values.name | upper }}",
        "{{ if .Values.on }}",
        "{{ end }}",
        "{{ .Values.name",
        "{{ .Values.name .Values.name }}",
        '{{ printf "%d" .Values.count }}',
        "{{ if .Values.on }}a{{ else if .Values.off }}b{{ end }}",
        "{{ (.Values.name }}",
        "{{ }}",
    ],
)
def test_unknown_template_syntax_is_refused(template):
    with pytest.raises(UnknownTemplateError):
        render_text(template, Values=VALUES)


def test_a_users_values_are_laid_over_those_of_the_chart():
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": []}) == {
        "a": {"b": 3, "c": 2},
        "d": [],
    }
