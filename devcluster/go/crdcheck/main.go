// Command crdcheck judges CustomResourceDefinitions as an API server does when they are created, without one: its own
// decoder and validation, the estimated cost of CEL rules among it. Usage: crdcheck FILE...
package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

func main() {
	refused := len(os.Args) < 2
	if refused {
		fmt.Fprintln(os.Stderr, "usage: crdcheck FILE...")
	}
	for _, file := range os.Args[1:] {
		problems, costs := check(file)
		for _, problem := range problems {
			fmt.Fprintf(os.Stderr, "%s: %s\n", file, problem)
		}
		fmt.Print(costs.report(file))
		refused = refused || len(problems) > 0
	}
	if refused {
		os.Exit(1)
	}
}

// check returns what an API server would answer to the file, and what its rules cost.
func check(file string) (problems []string, costs costs) {
	definition, err := read(file)
	if err != nil {
		return []string{err.Error()}, costs
	}
	for _, problem := range validation.ValidateCustomResourceDefinition(context.Background(), definition) {
		problems = append(problems, problem.Error())
	}
	costs, unfit := estimate(definition)
	return append(problems, unfit...), costs
}

// read decodes strictly, as for `kubectl apply --validate=strict`: a misspelt field is an error, not lost.
func read(file string) (*apiextensions.CustomResourceDefinition, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	install.Install(scheme)
	codecs := serializer.NewCodecFactory(scheme, serializer.EnableStrict)
	object, err := runtime.Decode(codecs.UniversalDecoder(apiextensions.SchemeGroupVersion), text)
	if err != nil {
		return nil, err
	}
	definition, ok := object.(*apiextensions.CustomResourceDefinition)
	if !ok {
		return nil, fmt.Errorf("a %T, not a CustomResourceDefinition", object)
	}
	return definition, nil
}
