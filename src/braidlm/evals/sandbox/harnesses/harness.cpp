// The linker calls this in place of `main`: a program that exits earlier does not print the proof.
#include <stdio.h>
extern "C" int __real_main();
extern "C" int __wrap_main() {
    int code = __real_main();
    if (code == 0)
        for (int letter = getchar(); letter != EOF; letter = getchar()) putchar(letter);
    return code;
}
