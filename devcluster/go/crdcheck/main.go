// Command crdcheck judges CustomResourceDefinitions as an API server does when they are created, without one: its own
// decoder and validation, the estimated cost of CEL rules among it; and objects as it does before it stores them.
// Usage: crdcheck [-objects FILE] DEFINITION...
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

func main() {
	objects := flag.String("objects", "", "a file of objects to judge by the definitions")
	flag.Parse()
	refused := flag.NArg() == 0
	if refused {
		fmt.Fprintln(os.Stderr, "usage: crdcheck [-objects FILE] DEFINITION...")
	}
	var definitions []*apiextensions.CustomResourceDefinition
	for _, file := range flag.Args() {
		definition, err := read(file)
		if err != nil {
			refused = tell(file, []string{err.Error()}) || refused
			continue
		}
		definitions = append(definitions, definition)
		problems, costs := check(definition)
		refused = tell(file, problems) || refused
		if *objects == "" {
			fmt.Print(costs.report(file))
		}
	}
	if *objects != "" && !refused {
		refused = tell(*objects, checkObjects(*objects, definitions))
	}
	if refused {
		os.Exit(1)
	}
}

// tell prints problems and returns whether there are any.
func tell(file string, problems []string) bool {
	for _, problem := range problems {
		fmt.Fprintf(os.Stderr, "%s: %s\n", file, problem)
	}
	return len(problems) > 0
}

// check returns what an API server would answer to a definition, and what its rules cost.
func check(definition *apiextensions.CustomResourceDefinition) (problems []string, costs costs) {
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
