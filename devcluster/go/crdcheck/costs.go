package main

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/cel"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/version"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

// worst is how many rules are reported.
const worst = 5

// oldest is the oldest Kubernetes that we support (README): rules may only use what its CEL knows.
var oldest = environment.MustBaseEnvSet(version.MajorMinor(1, 33))

// rule is one x-kubernetes-validations entry and its estimated cost, times how often it may run on one object.
type rule struct {
	path    string
	message string
	cost    uint64
}

// costs are those of all rules of a definition.
type costs []rule

// estimate walks the schemas as the API server does, whose own sums are private to it, and compiles each rule for the
// oldest Kubernetes.
func estimate(definition *apiextensions.CustomResourceDefinition) (found costs, unfit []string) {
	for _, served := range definition.Spec.Versions {
		if schema := schemaOf(definition, served); schema != nil {
			walk(schema, validation.RootCELContext(schema), nil, &found, &unfit)
		}
	}
	slices.SortStableFunc(found, func(a, b rule) int {
		if a.cost > b.cost {
			return -1
		}
		return int(min(b.cost-a.cost, 1))
	})
	return found, unfit
}

// schemaOf finds it where the decoder puts one that all versions share, too.
func schemaOf(definition *apiextensions.CustomResourceDefinition, served apiextensions.CustomResourceDefinitionVersion) *apiextensions.JSONSchemaProps {
	for _, schema := range []*apiextensions.CustomResourceValidation{served.Schema, definition.Spec.Validation} {
		if schema != nil && schema.OpenAPIV3Schema != nil {
			return schema.OpenAPIV3Schema
		}
	}
	return nil
}

func walk(schema *apiextensions.JSONSchemaProps, at *validation.CELSchemaContext, path *field.Path, found *costs, unfit *[]string) {
	if len(schema.XValidations) > 0 {
		rules, err := compile(schema, at, path)
		*found = append(*found, rules...)
		if err != nil {
			*unfit = append(*unfit, err.Error())
		}
	}
	for name, child := range schema.Properties {
		walk(&child, at.ChildPropertyContext(&child, name), path.Child(name), found, unfit)
	}
	if schema.AdditionalProperties != nil && schema.AdditionalProperties.Schema != nil {
		child := schema.AdditionalProperties.Schema
		walk(child, at.ChildAdditionalPropertiesContext(child), path.Key("*"), found, unfit)
	}
	if schema.Items != nil && schema.Items.Schema != nil {
		child := schema.Items.Schema
		walk(child, at.ChildItemsContext(child), path.Key("*"), found, unfit)
	}
}

func compile(schema *apiextensions.JSONSchemaProps, at *validation.CELSchemaContext, path *field.Path) ([]rule, error) {
	types, err := at.TypeInfo()
	if err != nil || types == nil {
		return nil, fmt.Errorf("%s: its rules have no types: %v", path, err)
	}
	results, err := cel.Compile(types.Schema, types.DeclType, celconfig.PerCallLimit, oldest, cel.NewExpressionsEnvLoader())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var rules []rule
	for i, result := range results {
		if result.Error != nil {
			return rules, fmt.Errorf("%s: Kubernetes 1.33: %s", path, result.Error.Detail)
		}
		times := result.MaxCardinality
		if at.MaxCardinality != nil {
			times = *at.MaxCardinality
		}
		message := schema.XValidations[i].Message
		rules = append(rules, rule{path.String(), message, product(result.MaxCost, times)})
	}
	return rules, nil
}

// product is the largest number where the true one is larger still.
func product(cost, times uint64) uint64 {
	if cost != 0 && math.MaxUint64/cost < times {
		return math.MaxUint64
	}
	return cost * times
}

func (all costs) total() uint64 {
	var sum uint64
	for _, each := range all {
		if math.MaxUint64-sum < each.cost {
			return math.MaxUint64
		}
		sum += each.cost
	}
	return sum
}

// report says how much of each budget is used, the dearest rules first.
func (all costs) report(file string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: %d rules use %s of the budget of all\n", file, len(all), share(all.total(), validation.StaticEstimatedCRDCostLimit))
	for _, each := range all[:min(worst, len(all))] {
		fmt.Fprintf(&text, "  %6s of one rule's  %s: %s\n", share(each.cost, validation.StaticEstimatedCostLimit), each.path, each.message)
	}
	return text.String()
}

func share(cost, limit uint64) string {
	return fmt.Sprintf("%.1f %%", 100*float64(cost)/float64(limit))
}
