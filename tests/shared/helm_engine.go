// The engine of Helm, which is of Go's standard library, with stand-ins for the functions that the charts
// use. Arguments: a chart; on stdin: Values and Release as JSON.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"
)

type files map[string]string

func (f files) Get(name string) string { return f[name] }
func pad(n int, s string) string {
	p := strings.Repeat(" ", n)
	return p + strings.Replace(s, "\n", "\n"+p, -1)
}
func toYaml(v interface{}) string {
	lines := []string{}
	switch one := v.(type) {
	case map[string]interface{}:
		keys := []string{}
		for key := range one {
			keys = append(keys, key)
		}
		sort.Strings(keys)
		for _, key := range keys {
			lines = append(lines, fmt.Sprintf("%q:%s", key, under(one[key])))
		}
	case []interface{}:
		for _, inner := range one {
			lines = append(lines, "-"+under(inner))
		}
	}
	if len(lines) == 0 {
		text, _ := json.Marshal(v)
		return string(text)
	}
	return strings.Join(lines, "\n")
}

func under(v interface{}) string {
	text := toYaml(v)
	switch v.(type) {
	case map[string]interface{}, []interface{}:
		return "\n" + pad(2, text)
	}
	return " " + text
}

func empty(v interface{}) bool { t, _ := template.IsTrue(v); return !t }

func main() {
	var root map[string]interface{}
	json.NewDecoder(os.Stdin).Decode(&root)
	f := files{}
	names, _ := filepath.Glob(filepath.Join(os.Args[1], "files", "*"))
	for _, n := range names {
		b, _ := os.ReadFile(n)
		f["files/"+filepath.Base(n)] = string(b)
	}
	root["Files"] = f
	funcs := template.FuncMap{
		"toYaml":  toYaml,
		"nindent": func(n int, s string) string { return "\n" + pad(n, s) },
		"indent":  pad,
		"quote":   func(v interface{}) string { return fmt.Sprintf("%q", fmt.Sprint(v)) },
		"int":     func(v interface{}) int { return int(v.(float64)) },
		"default": func(d, v interface{}) interface{} {
			if empty(v) {
				return d
			}
			return v
		},
	}
	names, _ = filepath.Glob(filepath.Join(os.Args[1], "templates", "*.yaml"))
	for _, n := range names {
		b, _ := os.ReadFile(n)
		t := template.Must(template.New(n).Funcs(funcs).Option("missingkey=error").Parse(string(b)))
		var out bytes.Buffer
		if err := t.Execute(&out, root); err != nil {
			panic(err)
		}
		fmt.Println("---")
		fmt.Println(out.String())
	}
}
