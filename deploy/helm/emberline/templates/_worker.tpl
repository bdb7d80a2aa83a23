{{- /* The pod of a worker. Called with a dict: root, name (of the pool), pool, isNode (a pod of a group other than its leader). */ -}}
{{- define "emberline.workerPod" -}}
{{- $root := .root }}
{{- $pool := .pool }}
metadata:
  labels: {{- include "emberline.labels" $root | nindent 4 }}
    app.kubernetes.io/component: worker
    emberline-pool: {{ .name }}
    emberline-role: {{ $pool.role }}
    emberline-generates: {{ ne $pool.role "prefill" | quote }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 120
  securityContext: {{- include "emberline.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "emberline.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        - {{ $pool.model | default $root.Values.model | quote }}
        - --role={{ $pool.role }}
        {{- range include "emberline.routerUrls" $root | splitList " " }}
        - --router={{ . }}
        {{- end }}
        - --worker-name=$(POD_NAME)
        - --worker-url={{ include "emberline.scheme" $root }}://$(POD_IP):8001
        - --host=0.0.0.0
        - --port=8001
        - --kv-port=9000
        {{- include "emberline.tlsArguments" $root | nindent 8 }}
        {{- if $pool.open }}
        - --open
        {{- end }}
        {{- if gt (int $pool.nodes) 1 }}
        - --nodes={{ $pool.nodes }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master=$(LWS_LEADER_ADDRESS):29500
        - --node-address=$(POD_IP)
        {{- end }}
        {{- if $root.Values.mooncake.enabled }}
        - --kv-store={{ include "emberline.name" $root }}-mooncake:{{ $root.Values.mooncake.port }}
        - --kv-store-memory={{ $root.Values.mooncake.memoryPerWorker }}
        - --kv-mooncake-host=$(POD_IP)
        {{- end }}
        {{- range $pool.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - { name: EMBERLINE_CACHE, value: /cache }
        - { name: HOME, value: /cache }
        {{- include "emberline.secretVariable" (dict "variable" "EMBERLINE_CLUSTER_KEY" "from" $root.Values.clusterKey) | nindent 8 }}
        {{- if $root.Values.huggingFace.secret }}
        {{- include "emberline.secretVariable" (dict "variable" "HF_TOKEN" "from" $root.Values.huggingFace) | nindent 8 }}
        {{- end }}
      {{- if not .isNode }}
      ports:
        - { name: http, containerPort: 8001 }
        - { name: kv, containerPort: 9000 }
      startupProbe:
        httpGet: { path: /health/ready, port: http, scheme: {{ include "emberline.scheme" $root | upper }} }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $pool.startupSeconds) 4) 5 }}
      {{- include "emberline.probes" (dict "root" $root "readiness" "/health/ready") | nindent 6 }}
      lifecycle: # moves open streams to other workers; SIGTERM then ends the worker
        preStop:
          exec:
            command:
              - sh
              - -fc # no expansion of * in --tls-names
              - exec timeout 90 emberline drain "$POD_NAME" --move{{ range include "emberline.routerUrls" $root | splitList " " }} --router {{ . }}{{ end }}{{ if $root.Values.tls.secret }} {{ include "emberline.tlsFiles" $root }}{{ end }}
      {{- end }}
      securityContext: {{- include "emberline.containerSecurity" $root | nindent 8 }}
      {{- $resources := deepCopy $pool.resources }}
      {{- if $pool.gpus }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (int $pool.gpus))) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - { name: tmp, mountPath: /tmp }
        - { name: shm, mountPath: /dev/shm }
        - { name: cache, mountPath: /cache }
        {{- include "emberline.tlsMount" $root | nindent 8 }}
  volumes:
    - { name: tmp, emptyDir: {} }
    {{- include "emberline.tlsVolume" $root | nindent 4 }}
    - { name: shm, emptyDir: { medium: Memory, sizeLimit: {{ $pool.sharedMemory }} } }
    {{- if $pool.cacheClaim }}
    - { name: cache, persistentVolumeClaim: { claimName: {{ $pool.cacheClaim }} } }
    {{- else }}
    - { name: cache, emptyDir: { sizeLimit: {{ $pool.cacheSize }} } }
    {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
