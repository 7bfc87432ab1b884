/* FNV-1a of 64 bits (Fowler, Noll, Vo), the hash under which llama.cpp's RPC workers keep tensors. */
#include "kq.h"

KQ_EXPORT uint64_t kq_fnv1a64(uint64_t hash, const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}
