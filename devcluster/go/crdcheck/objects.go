package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/listtype"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
)

// checkObjects returns what an API server with these definitions would answer to each document of the file.
func checkObjects(file string, definitions []*apiextensions.CustomResourceDefinition) (problems []string) {
	text, err := os.ReadFile(file)
	if err != nil {
		return []string{err.Error()}
	}
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for number := 0; ; number++ {
		var raw runtime.RawExtension
		var object unstructured.Unstructured
		err := decoder.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return problems
		}
		if err == nil {
			err = object.UnmarshalJSON(raw.Raw) // whole numbers stay whole
		}
		if err != nil {
			return append(problems, fmt.Sprintf("document %d: %s", number, err))
		}
		for _, problem := range judge(&object, definitions) {
			problems = append(problems, fmt.Sprintf("document %d: %s %s: %s", number, object.GetKind(), object.GetName(), problem))
		}
	}
}

func judge(object *unstructured.Unstructured, definitions []*apiextensions.CustomResourceDefinition) []string {
	for _, definition := range definitions {
		for _, served := range definition.Spec.Versions {
			if definition.Spec.Names.Kind == object.GetKind() && definition.Spec.Group+"/"+served.Name == object.GetAPIVersion() {
				return admit(object, schemaOf(definition, served))
			}
		}
	}
	return []string{fmt.Sprintf("no definition of %s %s", object.GetAPIVersion(), object.GetKind())}
}

// admit does what the API server does on creation, with strict field validation, before any webhook.
func admit(object *unstructured.Unstructured, schema *apiextensions.JSONSchemaProps) (problems []string) {
	structural, err := structuralschema.NewStructural(schema)
	if err != nil {
		return []string{err.Error()}
	}
	options := structuralschema.UnknownFieldPathOptions{TrackUnknownFieldPaths: true}
	for _, unknown := range pruning.PruneWithOptions(object.Object, structural, true, options) {
		problems = append(problems, fmt.Sprintf("unknown field %q", unknown))
	}
	defaulting.Default(object.Object, structural)
	validator, _, err := validation.NewSchemaValidator(schema)
	if err != nil {
		return append(problems, err.Error())
	}
	found := validation.ValidateCustomResource(nil, object.Object, validator)
	found = append(found, listtype.ValidateListSetsAndMaps(nil, structural, object.Object)...)
	if rules := cel.NewValidator(structural, true, celconfig.PerCallLimit); rules != nil && len(found) == 0 {
		var broken field.ErrorList
		broken, _ = rules.Validate(context.Background(), nil, structural, object.Object, nil, celconfig.RuntimeCELCostBudget)
		found = append(found, broken...)
	}
	for _, problem := range found {
		problems = append(problems, problem.Error())
	}
	return problems
}
