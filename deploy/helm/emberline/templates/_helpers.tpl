{{- define "emberline.name" -}}
{{- if contains "emberline" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-emberline{{ end -}}
{{- end }}

{{- define "emberline.labels" -}}
app.kubernetes.io/name: emberline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "emberline.selector" -}}
app.kubernetes.io/name: emberline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "emberline.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "emberline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "emberline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "emberline.secretVariable" -}}
- name: {{ .variable }}
  valueFrom: { secretKeyRef: { name: {{ .from.secret }}, key: {{ .from.key }} } }
{{- end }}

{{- define "emberline.probes" -}}
livenessProbe:
  httpGet: { path: /health/live, port: http, scheme: {{ include "emberline.scheme" .root | upper }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: {{ .readiness }}, port: http, scheme: {{ include "emberline.scheme" .root | upper }} }
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{- define "emberline.scheme" -}}
{{- if .Values.tls.secret }}https{{ else }}http{{ end -}}
{{- end }}

{{- /* Options of routers, workers and drain. */ -}}
{{- define "emberline.tlsFiles" -}}
--tls-cert=/tls/tls.crt --tls-key=/tls/tls.key --tls-ca=/tls/ca.crt{{ with .Values.tls.names }} --tls-names={{ . }}{{ end }}
{{- end }}

{{- define "emberline.tlsArguments" -}}
{{- if .Values.tls.secret }}
{{- range include "emberline.tlsFiles" . | splitList " " }}
- {{ . | quote }}
{{- end }}
- --tls-client-certs=cluster
{{- end }}
{{- end }}

{{- define "emberline.tlsMount" -}}
{{- if .Values.tls.secret }}
- { name: tls, mountPath: /tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "emberline.tlsVolume" -}}
{{- if .Values.tls.secret }}
- { name: tls, secret: { secretName: {{ .Values.tls.secret }}, defaultMode: 0440 } }
{{- end }}
{{- end }}

{{- define "emberline.routerUrl" -}}
{{ include "emberline.scheme" . }}://{{ include "emberline.name" . }}-router:{{ .Values.router.port }}
{{- end }}

{{- define "emberline.scaleTarget" -}}
{{- if gt (int .pool.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ .name }}
{{- end }}

{{- /* The URLs of all routers by their own names, with spaces between them. */ -}}
{{- define "emberline.routerUrls" -}}
{{- $name := include "emberline.name" . }}
{{- range $index := until (int .Values.router.replicas) }}
{{- if $index }} {{ end }}{{ include "emberline.scheme" $ }}://{{ $name }}-router-{{ $index }}.{{ $name }}-routers:{{ $.Values.router.port }}
{{- end }}
{{- end }}
