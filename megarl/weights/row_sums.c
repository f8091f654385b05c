/* Copies rows of bytes and sums some of them in the same pass, while they are in a cache. See row_sums.py. */

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian"
#endif

/* The same function for several kinds of processor; the loader picks one, so that a cache can be shared by them. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_ALL_PROCESSORS __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_ALL_PROCESSORS
#endif

#define GROUP 16
#define ROW_SEED 0x243F6A8885A308D3u

/* splitmix64, made odd. */
static uint64_t key_of(uint64_t index, uint64_t seed)
{
    uint64_t x = index * 0x9E3779B97F4A7C15u + seed;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) | 1;
}

FOR_ALL_PROCESSORS
static uint64_t whole_words(const char *row, int64_t count, const uint64_t *keys)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, row + 8 * i, 8);
        sum += word * keys[i];
    }
    return sum;
}

/* A row that begins `lead` bytes after the beginning of a word. */
static uint64_t sum_of(const char *row, int64_t bytes, int64_t lead, const uint64_t *keys)
{
    uint64_t sum = 0, word = 0;
    if (lead) {
        int64_t head = 8 - lead < bytes ? 8 - lead : bytes;
        memcpy((char *)&word + lead, row, head);
        sum = word * *keys++;
        row += head;
        bytes -= head;
    }
    sum += whole_words(row, bytes / 8, keys);
    if (bytes % 8) {
        word = 0;
        memcpy(&word, row + bytes - bytes % 8, bytes % 8);
        sum += word * keys[bytes / 8];
    }
    return sum;
}

/* Copies `rows` rows of `bytes` bytes (if `to` is not null), and returns the sum of those whose group is the `turn`-th
   of `every` from the first on; every = 0 sums none. Word keys begin 15 words before the row's first one. `group` is
   the index of the first row's group and of all dims before; `first_row` counts within the matrix. */
uint64_t megarl_rows(char *to, int64_t to_step, const char *from, int64_t from_step, int64_t rows, int64_t bytes,
                     int64_t first_row, int64_t lead, const uint64_t *keys, uint64_t group, int64_t every, int64_t turn)
{
    uint64_t sum = 0;
    int64_t index = 0;
    for (int64_t row = 0; row < rows; index++) {
        int64_t stop = row + GROUP - (first_row + row) % GROUP;
        if (stop > rows)
            stop = rows;
        if (every == 0 || index % every != turn) {
            if (to && to_step == bytes && from_step == bytes)
                memcpy(to + row * bytes, from + row * bytes, (stop - row) * bytes);
            else
                for (int64_t r = row; to && r < stop; r++)
                    memcpy(to + r * to_step, from + r * from_step, bytes);
            row = stop;
            continue;
        }
        uint64_t here = 0;
        for (; row < stop; row++) {
            const char *held = from + row * from_step;
            if (to) /* what is summed is read back from where it was written */
                held = memcpy(to + row * to_step, held, bytes);
            here += sum_of(held, bytes, lead, keys + GROUP - 1 - (first_row + row) % GROUP);
        }
        sum += here * key_of(group + index, ROW_SEED);
    }
    return sum;
}
