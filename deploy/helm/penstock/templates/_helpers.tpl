{{- /* Arguments are lists: the root context, the component, and where named its values. Values are JSON, which needs no indentation. */}}
{{- define "penstock.selector" -}}
{"app.kubernetes.io/name":"penstock","app.kubernetes.io/instance":{{ toJson (index . 0).Release.Name }},"app.kubernetes.io/component":{{ toJson (index . 1) }}}
{{- end }}

{{- define "penstock.labels" -}}
{"app.kubernetes.io/name":"penstock","app.kubernetes.io/instance":{{ toJson (index . 0).Release.Name }},"app.kubernetes.io/component":{{ toJson (index . 1) }},"app.kubernetes.io/version":{{ toJson (index . 0).Chart.AppVersion }},"app.kubernetes.io/managed-by":{{ toJson (index . 0).Release.Service }},"helm.sh/chart":{{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | toJson }}}
{{- end }}

{{- /* The labels, and those of the values: root, component, labels */}}
{{- define "penstock.labelsWith" -}}
{{ merge (include "penstock.labels" . | fromJson) (index . 2) | toJson }}
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

{{- /* "true" if the chart runs Redis, otherwise "" */}}
{{- define "penstock.ownRedis" -}}
{{- if and .Values.redis.enabled .Values.worker.enabled (not .Values.redis.url) (not .Values.redis.urlSecret) }}true{{ end -}}
{{- end }}

{{- define "penstock.models" -}}
{{- if .Values.models.volume -}}
{{ merge (dict "name" "models") .Values.models.volume | toJson }}
{{- else -}}
{"name":"models","configMap":{"name":{{ printf "%s-models" .Release.Name | toJson }}}}
{{- end -}}
{{- end }}

{{- /* The metadata of a pod: root, component, values */}}
{{- define "penstock.podMetadata" -}}
{{- $root := index . 0 }}
{{- $values := index . 2 -}}
labels: {{ include "penstock.labelsWith" (list $root (index . 1) $values.podLabels) }}
annotations: {{ merge (dict "penstock/models" (toJson $root.Values.models.files | sha256sum)) $values.podAnnotations | toJson }}
{{- end }}

{{- /* What all pods of our image have: the root context */}}
{{- define "penstock.pod" -}}
enableServiceLinks: false
{{- with include "penstock.serviceAccount" . }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: {{ .Values.serviceAccount.automount }}
securityContext: {{ toJson .Values.podSecurityContext }}
imagePullSecrets: {{ toJson .Values.imagePullSecrets }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary .Release.Name "" .Values.serviceAccount.create) -}}
{{- end }}

{{- /* Where the pods of servers and workers run, and what starts before them: root, component, values */}}
{{- define "penstock.scheduling" -}}
{{- $root := index . 0 }}
{{- $values := index . 2 }}
{{- $gpu := $values.gpu }}
{{- $selector := include "penstock.selector" . | fromJson -}}
{{- if and $gpu.count $gpu.runtimeClassName -}}
runtimeClassName: {{ toJson $gpu.runtimeClassName }}
{{ end -}}
{{- with $values.priorityClassName -}}
priorityClassName: {{ toJson . }}
{{ end -}}
{{- if $gpu.count -}}
nodeSelector: {{ merge (dict) $values.nodeSelector $gpu.nodeSelector | toJson }}
tolerations: {{ concat $values.tolerations $gpu.tolerations | default list | toJson }}
{{ else -}}
nodeSelector: {{ toJson $values.nodeSelector }}
tolerations: {{ toJson $values.tolerations }}
{{ end -}}
affinity: {{ toJson $values.affinity }}
{{- $spread := list }}
{{- range $values.topologySpreadConstraints }}
{{- $spread = append $spread (merge (dict) . (dict "labelSelector" (dict "matchLabels" $selector))) }}
{{- end }}
topologySpreadConstraints: {{ toJson $spread }}
initContainers: {{ toJson $values.initContainers }}
{{- end }}

{{- /* The resources with the GPUs: root, component, values */}}
{{- define "penstock.resources" -}}
{{- $component := index . 1 }}
{{- $values := index . 2 }}
{{- $gpu := $values.gpu }}
{{- $limits := $values.resources.limits | default dict }}
{{- if and $gpu.count (hasKey $limits $gpu.resource) }}
{{- fail (printf "%s.gpu.count and %s.resources.limits both set %s: keep one of them" $component $component $gpu.resource) }}
{{- end }}
{{- if $gpu.count }}
{{- merge (dict "limits" (merge (dict $gpu.resource (int $gpu.count)) $limits)) $values.resources | toJson }}
{{- else }}
{{- toJson $values.resources }}
{{- end }}
{{- end }}

{{- /* The environment as a list: the root context, the chart's own variables, the user's, which replace them */}}
{{- define "penstock.env" -}}
{{- $names := list }}
{{- range index . 2 }}
{{- $names = append $names .name }}
{{- end }}
{{- $own := index . 1 }}
{{- if (index . 0).Values.securityContext.readOnlyRootFilesystem }}
{{- $own = append $own (dict "name" "HOME" "value" "/tmp") }}
{{- end }}
{{- $all := list }}
{{- range $own }}
{{- if not (has .name $names) }}
{{- $all = append $all . }}
{{- end }}
{{- end }}
{{- concat $all (index . 2) | default list | toJson }}
{{- end }}

{{- /* The volumes of a pod, and where its container sees them: root, component, values, further volumes of the chart, each with a mountPath */}}
{{- define "penstock.volumes" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- $values := index . 2 }}
{{- $places := list }}
{{- $names := list }}
{{- range $values.extraVolumeMounts }}
{{- $places = append $places .mountPath }}
{{- end }}
{{- range $values.extraVolumes }}
{{- $names = append $names .name }}
{{- end }}
{{- $own := list (dict "name" "tmp" "emptyDir" (dict) "mountPath" "/tmp") }}
{{- if $root.Values.tmpSize }}
{{- $own = list (dict "name" "tmp" "emptyDir" (dict "sizeLimit" $root.Values.tmpSize) "mountPath" "/tmp") }}
{{- end }}
{{- if $root.Values.shmSize }}
{{- $own = append $own (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" $root.Values.shmSize) "mountPath" "/dev/shm") }}
{{- end }}
{{- $mounts := list }}
{{- $volumes := list }}
{{- range concat (index . 3) $own }}
{{- if not (has .mountPath $places) }}
{{- if has .name $names }}
{{- fail (printf "%s.extraVolumes: the chart has a volume %q of its own; choose another name" $component .name) }}
{{- end }}
{{- $readOnly := not (has .name (list "tmp" "shm")) }}
{{- $mounts = append $mounts (merge (dict "name" .name "mountPath" .mountPath) (ternary (dict "readOnly" true) (dict) $readOnly)) }}
{{- $volumes = append $volumes (omit . "mountPath") }}
{{- end }}
{{- end }}
{{- dict "volumeMounts" (concat $mounts $values.extraVolumeMounts | default list) "volumes" (concat $volumes $values.extraVolumes | default list) | toJson }}
{{- end }}

{{- /* Fails if the limits of the replicas contradict each other: the component, its autoscaling */}}
{{- define "penstock.checkReplicas" -}}
{{- $auto := index . 1 }}
{{- if gt (int $auto.minReplicas) (int $auto.maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas is %d, above maxReplicas, %d" (index . 0) (int $auto.minReplicas) (int $auto.maxReplicas)) }}
{{- end }}
{{- end }}
