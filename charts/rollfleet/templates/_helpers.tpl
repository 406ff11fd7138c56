{{- define "rollfleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Deployment, ServiceAccount and roles of the operator. */ -}}
{{- define "rollfleet.operatorName" -}}
{{ include "rollfleet.fullname" . }}-operator
{{- end -}}

{{- define "rollfleet.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rollfleet.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "rollfleet.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rollfleet
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "rollfleet.image" -}}
{{- $repository := required "image.repository must be set: build the image with Dockerfile.operator and push it" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ $repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* What the operator does in every namespace with fleets: exactly these verbs; runtime/permissions.py has the same list. */ -}}
{{- define "rollfleet.fleetRules" -}}
- apiGroups: [rollfleet.io]
  resources: [rolloutengines, weightversions]
  verbs: [get, list, watch]
- apiGroups: [rollfleet.io]
  resources: [rolloutengines/status, weightversions/status]
  verbs: [update]
# Engines. Also what the router's Role grants: nobody may grant what he does not hold.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# Children of a fleet, by server-side apply (create and patch).
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Leases that trainers hold, made beforehand for fleets with spec.trainers.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, list, watch, create, patch, delete]
# Certificates of the control ports. No list: other Secrets are none of its business.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
