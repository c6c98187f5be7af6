/* A driver's libnvidia-ml.so.1 with two GPUs. The file that NVML_PLAN names says what processes use of them: lines of
   GPU, pid, bytes and percent; the word "stuck" is a driver that does not answer, once the working directory has a file "stuck". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_FOUND = 6, TOO_SMALL = 7, UNKNOWN = 999 };

struct process { unsigned pid; unsigned long long memory; unsigned part, instance; };
struct sample { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; };
struct line { unsigned gpu, pid, percent; unsigned long long memory; };

static unsigned long long moment = 1000;

static int plan(unsigned gpu, struct line *found) {
    FILE *file = fopen(getenv("NVML_PLAN"), "r");
    char text[200];
    int count = 0;
    while (file && fgets(text, sizeof text, file)) {
        struct line *one = &found[count];
        if (!strncmp(text, "stuck", 5)) {
            fclose(fopen("stuck", "w"));
            for (;;) pause();
        }
        if (sscanf(text, "%u %u %llu %u", &one->gpu, &one->pid, &one->memory, &one->percent) == 4 && one->gpu == gpu)
            count++;
    }
    if (file) fclose(file);
    return count;
}

int nvmlInitWithFlags(unsigned flags) { return OK; }
const char *nvmlErrorString(int result) { return "planted"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *processes) {
    struct line lines[64];
    int found = plan((unsigned)(long)device - 1, lines);
    int room = (int)*count;
    *count = found;
    if (found > room) return TOO_SMALL;
    for (int at = 0; at < found; at++)
        processes[at] = (struct process){lines[at].pid, lines[at].memory, -1, -1};
    return OK;
}

int nvmlDeviceGetProcessUtilization(void *device, struct sample *samples, unsigned *count, unsigned long long last) {
    struct line lines[64];
    int found = plan((unsigned)(long)device - 1, lines);
    int room = (int)*count;
    *count = found + 1;
    if (!found) return NOT_FOUND;
    if (!samples || found + 1 > room) return TOO_SMALL;
    moment += 1000;
    for (int at = 0; at < found; at++)
        samples[at] = (struct sample){lines[at].pid, moment, lines[at].percent};
    samples[found] = (struct sample){0};
    return OK;
}
