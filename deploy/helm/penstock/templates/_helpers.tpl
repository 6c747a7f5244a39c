{{- /* Each argument is a list: the root context, and the component. Values are JSON, which needs no indentation. */}}
{{- define "penstock.selector" -}}
{"app.kubernetes.io/name":"penstock","app.kubernetes.io/instance":{{ toJson (index . 0).Release.Name }},"app.kubernetes.io/component":{{ toJson (index . 1) }}}
{{- end }}

{{- define "penstock.labels" -}}
{"app.kubernetes.io/name":"penstock","app.kubernetes.io/instance":{{ toJson (index . 0).Release.Name }},"app.kubernetes.io/component":{{ toJson (index . 1) }},"app.kubernetes.io/version":{{ toJson (index . 0).Chart.AppVersion }},"app.kubernetes.io/managed-by":{{ toJson (index . 0).Release.Service }},"helm.sh/chart":{{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | toJson }}}
{{- end }}

{{- define "penstock.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | toJson }}
{{- end }}

{{- define "penstock.redis" -}}
{{- if .Values.redis.urlSecret -}}
{"name":"PENSTOCK_REDIS","valueFrom":{"secretKeyRef":{"name":{{ toJson .Values.redis.urlSecret }},"key":"url"}}}
{{- else if .Values.redis.url -}}
{"name":"PENSTOCK_REDIS","value":{{ toJson .Values.redis.url }}}
{{- else if .Values.redis.enabled -}}
{"name":"PENSTOCK_REDIS","value":{{ printf "redis://%s-redis:6379" .Release.Name | toJson }}}
{{- else -}}
{{ fail "workers need Redis: set redis.enabled, redis.url or redis.urlSecret" }}
{{- end -}}
{{- end }}

{{- define "penstock.podSecurity" -}}
{"runAsUser":1000,"runAsGroup":1000,"fsGroup":1000,"runAsNonRoot":true,"seccompProfile":{"type":"RuntimeDefault"}}
{{- end }}

{{- define "penstock.security" -}}
{"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]}}
{{- end }}

{{- define "penstock.models" -}}
{{- if .Values.models.volume -}}
{{ merge (dict "name" "models") .Values.models.volume | toJson }}
{{- else -}}
{"name":"models","configMap":{"name":{{ printf "%s-models" .Release.Name | toJson }}}}
{{- end -}}
{{- end }}
