# Makes llama.cpp ours as it is configured: applies patches/llama.cpp/*.patch to its sources, and has the sources in
# native/ compiled into its targets (native.cmake).
#
#     cmake -DCMAKE_PROJECT_INCLUDE=/path/to/patches/apply.cmake ...
#
# works for llama-cpp-python (CMAKE_ARGS) and for llama.cpp itself. -DLLAMA_PATCHES=OFF builds stock sources. A patch
# that does not apply stops the build with its name. What was applied lies in .patches/ beside the sources, so that a
# later configuration with other patches takes it back first. `llama_patches()`, exported by libllama, returns the
# names of the changes: the words after "Changes:" in the patches' headers.
#
# CMAKE_PROJECT_INCLUDE and not CMAKE_PROJECT_TOP_LEVEL_INCLUDES, which CMake before 3.24 ignores without a word.

if(NOT CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)
    return() # a project inside
endif()

# A library keeps to itself what static libraries bring. A compiler that finds no libstdc++.so links libstdc++.a:
# exported, its locales share some numbers of facets with the libstdc++.so.6 of numpy or PyTorch and not others, and a
# process crashes when it loads a model. Not add_link_options(), which also reaches nvcc's device link.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    string(APPEND CMAKE_SHARED_LINKER_FLAGS " -Wl,--exclude-libs,ALL")
endif()

option(LLAMA_PATCHES "Patch llama.cpp" ON)

set(LLAMA_PATCHED_DIR ${CMAKE_SOURCE_DIR})
if(EXISTS ${CMAKE_SOURCE_DIR}/vendor/llama.cpp/src/CMakeLists.txt)
    set(LLAMA_PATCHED_DIR ${CMAKE_SOURCE_DIR}/vendor/llama.cpp)
endif()

# Runs patch(1) on the sources with the file as its input.
function(llama_patch_run file result output)
    execute_process(
        COMMAND ${PATCH_PROGRAM} -p1 -s -f -F0 -r - --no-backup-if-mismatch ${ARGN}
        WORKING_DIRECTORY ${LLAMA_PATCHED_DIR}
        INPUT_FILE ${file}
        RESULT_VARIABLE code
        OUTPUT_VARIABLE text
        ERROR_VARIABLE text)
    set(${result} ${code} PARENT_SCOPE)
    set(${output} "${text}" PARENT_SCOPE)
endfunction()

function(llama_patch_sources)
    set(queue "")
    if(LLAMA_PATCHES)
        file(GLOB queue ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/llama.cpp/*.patch)
        set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${queue})
    endif()
    file(GLOB applied ${LLAMA_PATCHED_DIR}/.patches/*.patch)

    set(names "")
    set(changes "")
    set(wanted "")
    foreach(patch IN LISTS queue)
        get_filename_component(name ${patch} NAME_WE)
        file(SHA256 ${patch} digest)
        list(APPEND names ${name})
        list(APPEND wanted "${name} ${digest}")
        file(STRINGS ${patch} line REGEX "^Changes: ")
        string(REGEX REPLACE "^Changes: +" "" line "${line}")
        list(APPEND changes ${line})
    endforeach()
    set(present "")
    foreach(patch IN LISTS applied)
        get_filename_component(name ${patch} NAME_WE)
        file(SHA256 ${patch} digest)
        list(APPEND present "${name} ${digest}")
    endforeach()

    if(NOT wanted STREQUAL present)
        find_program(PATCH_PROGRAM patch)
        if(NOT PATCH_PROGRAM)
            message(FATAL_ERROR "llama.cpp's patches need the program patch (or PATCHES=0 for stock llama.cpp)")
        endif()
        list(REVERSE applied)
        foreach(patch IN LISTS applied)
            llama_patch_run(${patch} code text -R)
            if(code)
                message(FATAL_ERROR "${LLAMA_PATCHED_DIR} has changed since ${patch} was applied; "
                    "delete that folder to have it unpacked again:\n${text}")
            endif()
            file(REMOVE ${patch})
        endforeach()
        foreach(patch IN LISTS queue)
            get_filename_component(name ${patch} NAME_WE)
            llama_patch_run(${patch} code text --dry-run)
            if(NOT code)
                llama_patch_run(${patch} code text)
            endif()
            if(code)
                message(FATAL_ERROR "the patch ${name} does not apply to ${LLAMA_PATCHED_DIR} "
                    "(PATCHES=0 builds stock llama.cpp):\n${text}")
            endif()
            file(COPY ${patch} DESTINATION ${LLAMA_PATCHED_DIR}/.patches)
        endforeach()
    endif()

    if(names)
        list(JOIN names " " said)
        message(STATUS "llama.cpp's patches: ${said}")
        list(JOIN changes " " said)
        file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/llama-patches.cpp @ONLY CONTENT [[
// The changes that this libllama was built with, separated by spaces.
#ifdef _WIN32
#define LLAMA_PATCHES_API __declspec(dllexport)
#else
#define LLAMA_PATCHES_API __attribute__((visibility("default")))
#endif
extern "C" LLAMA_PATCHES_API const char * llama_patches(void);
extern "C" LLAMA_PATCHES_API const char * llama_patches(void) {
    return "@said@";
}
]])
        # at the end, when the targets are known
        cmake_language(DEFER CALL target_sources llama PRIVATE ${CMAKE_BINARY_DIR}/llama-patches.cpp)
    endif()
endfunction()

llama_patch_sources()

if(LLAMA_PATCHES)
    include(${CMAKE_CURRENT_LIST_DIR}/native.cmake)
endif()
